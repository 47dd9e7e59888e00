"""Every optimizer and every scheduler of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch import optim as O
from torch.optim import lr_scheduler

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], O.Optimizer]] = {
    "SGD": lambda p: O.SGD(p, lr=0.1),
    "SGD-momentum": lambda p: O.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "SGD-fused": lambda p: O.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "Adam": lambda p: O.Adam(p, lr=0.1, amsgrad=True),
    "Adam-tensor-lr": lambda p: O.Adam(p, lr=torch.tensor(0.1), betas=(0.8, 0.9)),
    "Adam-fused": lambda p: O.Adam(p, lr=0.1, fused=True),
    "Adam-foreach": lambda p: O.Adam(p, lr=0.1, foreach=True, maximize=True),
    "AdamW": lambda p: O.AdamW(p, lr=0.1),
    "Adamax": lambda p: O.Adamax(p, lr=0.1),
    "NAdam": lambda p: O.NAdam(p, lr=0.1),
    "RAdam": lambda p: O.RAdam(p, lr=0.1),
    "Adagrad": lambda p: O.Adagrad(p, lr=0.1, lr_decay=0.1),
    "Adadelta": lambda p: O.Adadelta(p, lr=0.1),
    "Adafactor": lambda p: O.Adafactor(p, lr=0.1),
    "ASGD": lambda p: O.ASGD(p, lr=0.1, t0=2),
    "Rprop": lambda p: O.Rprop(p, lr=0.1),
    "RMSprop": lambda p: O.RMSprop(p, lr=0.1, centered=True, momentum=0.5),
    "LBFGS": lambda p: O.LBFGS(p, lr=0.1, max_iter=4),
    "LBFGS-wolfe": lambda p: O.LBFGS(p, lr=0.1, max_iter=4, line_search_fn="strong_wolfe"),
    "SparseAdam": lambda p: O.SparseAdam(p, lr=0.1),
    "Muon": lambda p: O.Muon([q for q in p if q.dim() == 2], lr=0.1),
}

SCHEDULERS: dict[str, Callable[[O.Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3, 3, 6]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, total_iters=6),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, total_iters=7),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 9),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3, mode="exp_range", gamma=0.9),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, mode="max", patience=1),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=3), lr_scheduler.CosineAnnealingLR(o, 5)], [5]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ExponentialLR(o, 0.9), lr_scheduler.StepLR(o, 3)]
    ),
}
