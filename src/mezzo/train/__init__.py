"""Training of text classifiers: BERT on labelled texts, in fp32 or mixed precision."""

from .config import TrainConfig as TrainConfig
from .config import demo_config as demo_config
from .loop import run as run
from .train_result import TrainResult as TrainResult
