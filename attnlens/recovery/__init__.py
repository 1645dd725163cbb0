"""Token identifiability: can a token be told from its hidden state?"""

from attnlens.recovery.map_training import MapTraining
from attnlens.recovery.recovery_result import TokenIdentifiabilityResult
from attnlens.recovery.token_identifiability import TokenIdentifiability

__all__ = ["MapTraining", "TokenIdentifiability", "TokenIdentifiabilityResult"]
