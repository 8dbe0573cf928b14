"""CTC with zero_infinity=True: clips whose transcript does not fit count nothing."""

import torch
import torch.nn as nn

import mezzo


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(12, 24, 3, padding=1)
        self.lstm = nn.LSTM(24, 24, batch_first=True)
        self.fc = nn.Linear(24, 8)

    def forward(self, x):
        h = torch.relu(self.conv(x.transpose(1, 2))).transpose(1, 2)
        return self.fc(self.lstm(h)[0])


def run_epoch(model, opt, amp, loader, ctc):
    for x, y, xl, yl in loader:
        opt.zero_grad(set_to_none=True)
        lp = model(x).log_softmax(-1).transpose(0, 1)
        loss = ctc(lp, y, xl, yl)
        amp.backward(loss)
        amp.step(max_norm=1.0)
        yield loss.item()


if __name__ == "__main__":
    torch.manual_seed(0)
    model = Net()
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    amp = mezzo.prepare(model, opt, policy="bf16")
    loader = [
        (torch.randn(3, 20, 12), torch.randint(1, 8, (3, 9)), torch.tensor([20, 18, 15]), torch.tensor([9, 6, 4]))
        for _ in range(4)
    ]
    ctc = nn.CTCLoss(zero_infinity=True)
    for e in range(2):
        print(e, list(run_epoch(model, opt, amp, loader, ctc)))
