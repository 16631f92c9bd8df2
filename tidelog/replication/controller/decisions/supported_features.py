"""Which feature levels this software knows, and which a new cluster starts with. Pure."""

from __future__ import annotations

from tidelog.replication.controller.metadata.image import ELR_FEATURE, METADATA_VERSION
from tidelog.replication.controller.metadata.record_codec import LATEST_METADATA_VERSION, LOWEST_METADATA_VERSION

# Lowest to highest level. Features whose protocols are not served stay at 0 and unlisted, so that no client relies on
# them.
SUPPORTED_FEATURES: dict[str, tuple[int, int]] = {
    METADATA_VERSION: (LOWEST_METADATA_VERSION, LATEST_METADATA_VERSION),
    ELR_FEATURE: (0, 1),
    "kraft.version": (0, 1),  # the quorum's own: finalized in its control records, not by the controller
}
NEW_CLUSTER_FEATURES: dict[str, int] = {METADATA_VERSION: LATEST_METADATA_VERSION, ELR_FEATURE: 1}
