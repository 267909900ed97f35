"""The loop of docs/interop.md for Lightning Fabric, started by torchrun: it brings data and logging, shardmp the step."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from lightning_fabric import Fabric
from lightning_fabric.loggers import CSVLogger
from loop_data import loss_of, make_loader, make_model, make_optimizer, write

import shardmp

torch.set_num_threads(1)
folder = Path(sys.argv[1])

# [in the docs]
fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp", loggers=CSVLogger(folder, name="metrics"))
fabric.launch()  # joins the ranks that torchrun started
model = make_model()
optimizer = make_optimizer(model)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
loader = fabric.setup_dataloaders(make_loader())  # the data alone: fabric.setup(model, optimizer) is not called
model, optimizer = shardmp.shard(model, optimizer, precision="fp16", max_grad_norm=0.5)

for epoch in range(2):
    loader.sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.backward(loss_of(model, inputs, targets))  # in the place of fabric.backward
        report = optimizer.step()
        optimizer.zero_grad()
        if not report.skipped:
            scheduler.step()
    fabric.log_dict({"loss": report.loss, "loss_scale": report.loss_scale}, step=epoch)
    fabric.print(f"epoch {epoch}: loss {report.loss:.4f}, loss scale {report.loss_scale:.0f}")

model.eval()
correct = model(inputs).argmax(-1) == targets
accuracy = fabric.all_reduce(correct.float().mean(), reduce_op="mean")
weights = model.state_dict()
if fabric.is_global_zero:
    torch.save(weights, folder / "weights.pt")
    fabric.logger.finalize("success")  # writes what is left
# [end]
write(folder, fabric.global_rank, model, optimizer)
