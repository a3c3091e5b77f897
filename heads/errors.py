"""Errors a user can act on: what was found, what was expected, what to run next."""


class WrongInput(Exception):
    """Input that cannot work. Printed without a traceback; the process exits with code 2."""


class GateFailed(Exception):
    """The work is done, but a measured value does not pass. Printed without a traceback; exit code 3."""


class TrainingFailed(Exception):
    """Training cannot go on: losses or gradients stay non-finite. Printed without a traceback; exit code 1."""


class StoreFailed(Exception):
    """A store does not answer any more, or refuses; what is here is whole. Printed without a traceback; exit code 1."""
