"""A region in which every op obeys the policy."""

from .region import autocast as autocast
