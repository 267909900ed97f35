"""The loop of docs/interop.md for Accelerate, started by torchrun: it brings data and logging, shardmp does the step."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from loop_data import loss_of, make_loader, make_model, make_optimizer, write

import shardmp

torch.set_num_threads(1)
folder = Path(sys.argv[1])

# [in the docs]
accelerator = Accelerator(mixed_precision="no", cpu=True)
model = make_model()
optimizer = make_optimizer(model)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
loader = accelerator.prepare(make_loader())  # the data alone: model, optimizer and scheduler are not prepared
model, optimizer = shardmp.shard(model, optimizer, precision="fp16", max_grad_norm=0.5)

for epoch in range(2):
    for inputs, targets in loader:
        optimizer.backward(loss_of(model, inputs, targets))  # in the place of accelerator.backward
        report = optimizer.step()
        optimizer.zero_grad()
        if not report.skipped:
            scheduler.step()
    accelerator.print(f"epoch {epoch}: loss {report.loss:.4f}, loss scale {report.loss_scale:.0f}")

model.eval()
correct = model(inputs).argmax(-1) == targets
accuracy = accelerator.gather_for_metrics(correct).float().mean()
accelerator.save(model.state_dict(), folder / "weights.pt")  # on the main process alone
# [end]
write(folder, accelerator.process_index, model, optimizer)
accelerator.end_training()
