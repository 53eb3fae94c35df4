"""Correct trainings in every layout: none may be called wrong."""

from __future__ import annotations

import torch

from outside.layouts.training import Layout, Setup

LAYOUTS = (
    Layout("accumulate2", accumulate=2), Layout("accumulate4", accumulate=4),
    Layout("ddp2", data=2, by="ddp"), Layout("ddp4", data=4, by="ddp"),
    Layout("ddp2-accumulate2", data=2, by="ddp", accumulate=2), Layout("ddp2-strided", data=2, by="ddp", strided=True),
    Layout("ddp4-strided-accumulate2", data=4, by="ddp", strided=True, accumulate=2),
    Layout("hand2", data=2), Layout("hand4", data=4),
    Layout("fsdp2", data=2, by="fsdp"), Layout("fsdp4", data=4, by="fsdp"),
    Layout("fsdp2-accumulate2", data=2, by="fsdp", accumulate=2), Layout("hsdp4", data=4, by="hsdp"),
    Layout("tensor2", tensor=2, cut_by="dtensor"), Layout("tensor4", tensor=4, cut_by="dtensor"),
    Layout("tensor2-sequence", tensor=2, cut_by="dtensor", sequence=True),
    Layout("tensor2-hand", tensor=2), Layout("tensor4-hand", tensor=4),
    Layout("tensor2-sequence-hand", tensor=2, sequence=True), Layout("tensor4-sequence-hand", tensor=4, sequence=True),
    Layout("pipeline2-gpipe", stages=2, schedule="gpipe"), Layout("pipeline2", stages=2), Layout("pipeline4", stages=4),
    Layout("fsdp2-tensor2", data=2, tensor=2, by="fsdp", cut_by="dtensor"),
    Layout("ddp2-tensor2", data=2, tensor=2, by="ddp"), Layout("pipeline2-data2", stages=2, data=2),
    Layout("pipeline2-tensor2", stages=2, tensor=2),
)  # fmt: skip
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ONE = Layout("one")
REFERENCES = {f"one-{name}": Setup(dtype=dtype) for name, dtype in DTYPES.items()}
MORE = (  # what the planted faults need, done right
    ("adamw", Setup(optimizer="adamw"), ("ddp2", "fsdp2", "tensor2", "tensor2-hand", "pipeline2", "fsdp2-tensor2")),
    ("tied", Setup(tied=True), ("pipeline2", "pipeline4", "ddp2")),
    ("masked", Setup(masked=True), ("ddp2", "ddp2-accumulate2", "fsdp2")),
    ("batchnorm", Setup(batch_norm=True), ("ddp2", "hand4")),
    ("clip", Setup(clip=0.5), ("ddp2", "hand4")),
    ("ema", Setup(ema=True), ("hand2",)),
)
