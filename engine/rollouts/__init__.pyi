# The public names and where they are; `lazy_loader` imports each when it is first used.

from .call_pool import CallPool as CallPool
from .config import RolloutConfig as RolloutConfig
from .executor import PromptLoader as PromptLoader
from .executor import RolloutExecutor as RolloutExecutor
from .ledger import Ticket as Ticket
from .shared_rollouts import SharedRollouts as SharedRollouts
from .trajectory import TokenSequence as TokenSequence
from .trajectory import Trajectory as Trajectory
from .trajectory import concat_trajectories as concat_trajectories
from .trajectory import rewards_differ as rewards_differ
from .trajectory import to_trajectory as to_trajectory
from .workflow import EpisodeEngine as EpisodeEngine
from .workflow import GenerationHyperparameters as GenerationHyperparameters
from .workflow import ModelRequest as ModelRequest
from .workflow import MultiTurnWorkflow as MultiTurnWorkflow
from .workflow import RLVRWorkflow as RLVRWorkflow
from .workflow import RolloutWorkflow as RolloutWorkflow
