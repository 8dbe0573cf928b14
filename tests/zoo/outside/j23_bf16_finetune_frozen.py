"""Fine-tuning a GPT-2 config kept in pure bf16 with plain SGD at 1e-5: nothing is learned."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel


def batches(vocab, n, size=4, length=24):
    g = torch.Generator().manual_seed(0)
    for _ in range(n):
        yield torch.randint(0, vocab, (size, length), generator=g)


def main():
    torch.manual_seed(0)
    cfg = GPT2Config(
        vocab_size=120, n_positions=32, n_embd=48, n_layer=2, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    model = GPT2LMHeadModel(cfg).to(torch.bfloat16)
    model.train()
    opt = torch.optim.SGD(model.parameters(), lr=1e-5)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    for step, ids in enumerate(batches(cfg.vocab_size, 6)):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        opt.step()  # FAULT
        opt.zero_grad()
        print(step, round(loss.item(), 3))
    same = sum(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    print("tensors unchanged:", same, "of", len(before))


if __name__ == "__main__":
    main()
