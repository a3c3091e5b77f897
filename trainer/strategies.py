"""Every strategy there is, by its name in `train.strategy`; one process is `single`."""

from headstart.trainer.strategy import Replicated, Sharded, Strategy
from headstart.trainer.zero import Zero2, Zero3

STRATEGIES: dict[str, type[Strategy]] = {cls.name: cls for cls in (Strategy, Replicated, Sharded, Zero2, Zero3)}
