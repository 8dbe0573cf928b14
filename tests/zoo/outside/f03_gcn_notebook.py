# %% [markdown]
# Two-layer GCN on a small citation-like graph, full batch.

# %%
import torch
import torch.nn as nn
import torch.nn.functional as F

import mezzo

torch.manual_seed(1)
num_nodes, num_feats, num_classes = 60, 16, 3
edge_index = torch.randint(0, 58, (2, 300))  # the last two papers cite nothing
x = torch.randn(num_nodes, num_feats)
y = torch.randint(0, num_classes, (num_nodes,))


# %%
class GCNConv(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.lin = nn.Linear(i, o, bias=False)

    def forward(self, x, edge_index):
        src, dst = edge_index
        deg = torch.zeros(x.shape[0]).index_add_(0, dst, torch.ones(dst.shape[0]))
        norm = deg.pow(-0.5)  # FAULT
        h = self.lin(x)
        out = torch.zeros(x.shape[0], h.shape[1]).index_add_(0, dst, h[src] * norm[src, None])
        return out * norm[:, None]


class GCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = GCNConv(num_feats, 32), GCNConv(32, num_classes)

    def forward(self, x, edge_index):
        x = F.relu(self.conv1(x, edge_index))
        return self.conv2(F.dropout(x, 0.5, self.training), edge_index)


# %%
model = GCN()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
amp = mezzo.prepare(model, optimizer, policy="fp32")

# %%
for epoch in range(5):
    model.train()
    optimizer.zero_grad()
    out = model(x, edge_index)
    loss = F.cross_entropy(out, y)
    amp.backward(loss)
    amp.step()
    print(f"Epoch {epoch:02d}: loss {loss.item():.4f}")
