"""The feature levels that this software supports, and those of a new cluster. Pure."""

from __future__ import annotations

from tidelog.replication.controller.metadata.image import ELR_FEATURE, METADATA_VERSION, TRANSACTION_VERSION
from tidelog.replication.controller.metadata.record_codec import LATEST_METADATA_VERSION, LOWEST_METADATA_VERSION

# The lowest and the highest level. Features with unserved protocols are not listed, so that no
# client relies on them.
SUPPORTED_FEATURES: dict[str, tuple[int, int]] = {
    METADATA_VERSION: (LOWEST_METADATA_VERSION, LATEST_METADATA_VERSION),
    ELR_FEATURE: (0, 1),
    TRANSACTION_VERSION: (0, 2),
    "kraft.version": (0, 1),  # the quorum finalizes it in its control records
}
READS_BEFORE_REMOVAL = "tidelog.reads.before.removal"
"""In a broker's registration: as the leader, it reads its log before a reassignment removes other replicas."""
BROKER_FEATURES: dict[str, tuple[int, int]] = {**SUPPORTED_FEATURES, READS_BEFORE_REMOVAL: (0, 1)}
"""What a broker registers. What is only here is never finalized, and clients do not see it."""
NEW_CLUSTER_FEATURES: dict[str, int] = {
    METADATA_VERSION: LATEST_METADATA_VERSION,
    ELR_FEATURE: 1,
    TRANSACTION_VERSION: 2,
}
