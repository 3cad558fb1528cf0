"""What a run can be told: the hyper-parameters, the settings of one run and the presets behind the defaults."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Hyp:
    """Hyper-parameters under the names of YOLOv5's hyp files; the defaults are its "low" set (sizes n and s)."""

    lr0: float = 0.01  # learning rate after the warm-up
    lrf: float = 0.01  # last learning rate as a share of lr0
    momentum: float = 0.937  # SGD momentum, Adam beta1
    weight_decay: float = 5e-4
    warmup_epochs: float = 3.0
    warmup_momentum: float = 0.8
    warmup_bias_lr: float = 0.1
    box: float = 0.05  # gain of the box loss
    cls: float = 0.5  # gain of the class loss
    cls_pw: float = 1.0  # weight of positives in the class BCE
    obj: float = 1.0  # gain of the objectness loss
    obj_pw: float = 1.0  # weight of positives in the objectness BCE
    anchor_t: float = 4.0  # a box matches an anchor when no side differs by this factor
    fl_gamma: float = 0.0  # gamma of the focal loss, 0 is off
    label_smoothing: float = 0.0
    hsv_h: float = 0.015  # colour: hue, saturation, value, as fractions
    hsv_s: float = 0.7
    hsv_v: float = 0.4
    degrees: float = 0.0  # rotation, +- degrees
    translate: float = 0.1  # +- fraction of the side
    scale: float = 0.5  # +- gain
    shear: float = 0.0  # +- degrees
    perspective: float = 0.0  # +- fraction, 0 to 0.001
    flipud: float = 0.0  # probabilities from here on
    fliplr: float = 0.5
    mosaic: float = 1.0
    mixup: float = 0.0
    copy_paste: float = 0.0
