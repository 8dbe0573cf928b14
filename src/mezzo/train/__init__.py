"""Training of text classifiers: BERT on labelled texts, in fp32 or mixed precision."""

from .config import REVIEWS as REVIEWS
from .config import RunFolder as RunFolder
from .config import TrainConfig as TrainConfig
from .config import demo_config as demo_config
from .data import load_corpus as load_corpus
from .dist_context import FailedOnOtherRank as FailedOnOtherRank
from .dist_context import launch as launch
from .loop import TrainResult as TrainResult
from .loop import peak_memory_bytes as peak_memory_bytes
from .loop import run as run
from .model import encode as encode
from .model import parameter_groups as parameter_groups
from .model import train_tokenizer as train_tokenizer
from .predictor import Prediction as Prediction
from .predictor import Predictor as Predictor
from .text_files import refuse_wide as refuse_wide
