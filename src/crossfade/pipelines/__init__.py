"""Pipelines of stages: where to cut a module, and what a training step by each of torch's schedules will take."""

from crossfade.pipelines.orders import SCHEDULES
from crossfade.pipelines.predict import Prediction
from crossfade.pipelines.report import StageReport
from crossfade.pipelines.split import Split, split

__all__ = ["SCHEDULES", "Prediction", "Split", "StageReport", "split"]
