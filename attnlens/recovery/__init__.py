"""Token identifiability: can a token be told from its hidden state?"""

from attnlens.recovery.map_training import MapTraining
from attnlens.recovery.token_identifiability import TokenIdentifiability, TokenIdentifiabilityResult

__all__ = ["MapTraining", "TokenIdentifiability", "TokenIdentifiabilityResult"]
