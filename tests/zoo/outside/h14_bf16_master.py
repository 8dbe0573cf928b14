"""Small transformer trained with 16-bit weights and exact masters; learning rate small on purpose."""

import torch
import torch.nn as nn
import torch.nn.functional as F

import mezzo


class Net(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.emb = nn.Embedding(50, d)
        layer = nn.TransformerEncoderLayer(d, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(d, 50)

    def forward(self, ids, pad):
        return self.head(self.body(self.emb(ids), src_key_padding_mask=pad))


def copy_task(n=16, t=10):
    ids = torch.randint(1, 50, (n, t))
    pad = torch.arange(t)[None] >= torch.randint(3, t + 1, (n, 1))
    return ids.masked_fill(pad, 0), pad


torch.manual_seed(0)
net = Net()
opt = torch.optim.AdamW(net.parameters(), lr=1e-5, betas=(0.9, 0.95))
amp = mezzo.prepare(net, opt, policy="bf16-master")
for step in range(5):
    ids, pad = copy_task()
    opt.zero_grad()
    logits = net(ids, pad)
    loss = F.cross_entropy(logits[~pad], ids[~pad])
    amp.backward(loss)
    amp.step(max_norm=1.0)
    print(step, loss.item())
