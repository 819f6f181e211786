"""What can go wrong in a way the user can act on."""


class AutoparError(Exception):
    """What the user can act on: what happened, where, what now."""


class CaptureError(AutoparError):
    """The model cannot be turned into a graph."""


class NoPlanFits(AutoparError):
    """No way of splitting the model fits the cluster."""


class BadInput(AutoparError):
    """A file, an argument or an environment variable cannot be used as it is."""


class PlanMismatch(AutoparError):
    """A plan does not belong to this model, this cluster or this version."""
