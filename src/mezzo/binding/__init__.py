"""A policy made part of a model, so that it holds wherever and however its modules are called."""

from .bind import Binding as Binding
from .bind import bind as bind
from .bind import innermost as innermost
from .bind import record as record
