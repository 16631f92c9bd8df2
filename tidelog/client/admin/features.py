"""Which APIs and features brokers serve, and moving the finalized features of the cluster up or down (KIP-584).

Every broker answers for its own versions; finalized levels are the cluster's, and the controller changes them.
"""

from __future__ import annotations

from collections.abc import Mapping

from tidelog.client.admin.base import AdminBase, check
from tidelog.client.model import BrokerVersions
from tidelog.protocol.messages.api_versions import ApiVersionsRequest, ApiVersionsResponse
from tidelog.protocol.messages.update_features import FeatureUpdateKey, UpdateFeaturesRequest, UpdateFeaturesResponse
from tidelog.version import __version__

UPGRADE, SAFE_DOWNGRADE, UNSAFE_DOWNGRADE = 1, 2, 3


class FeaturesAdmin(AdminBase):
    """The part of `Admin` that is about versions and features."""

    async def describe_versions(self, broker_id: int | None = None) -> BrokerVersions:
        """The APIs and features of one broker, of any without an id. Raises KafkaError(NETWORK_EXCEPTION)."""

        async def attempt() -> ApiVersionsResponse:
            cluster = await self._reach()
            connection = await (cluster.any_connection() if broker_id is None else cluster.connection(broker_id))
            request = ApiVersionsRequest(client_software_name="tidelog", client_software_version=__version__)
            answer = await connection.call(request, ApiVersionsResponse, self._config.request_timeout_ms)
            check(answer.error_code, None, "versions" if broker_id is None else f"versions of broker {broker_id}")
            return answer

        answer = await self._until(attempt)
        return BrokerVersions(
            {each.api_key: (each.min_version, each.max_version) for each in answer.api_keys},
            {each.name: (each.min_version, each.max_version) for each in answer.supported_features},
            {each.name: each.max_version_level for each in answer.finalized_features},
            answer.finalized_features_epoch,
        )

    async def update_features(
        self, levels: Mapping[str, int], *, upgrade_type: int = UPGRADE, validate_only: bool = False
    ) -> None:
        """Finalize these levels, all or none; level 0 takes a feature out of use.

        `upgrade_type`: UPGRADE, SAFE_DOWNGRADE (refused where metadata would be lost) or UNSAFE_DOWNGRADE. Raises
        KafkaError, such as INVALID_UPDATE_VERSION or FEATURE_UPDATE_FAILED.
        """

        async def attempt() -> UpdateFeaturesResponse:
            connection = await self._controller()
            knows_types = connection.supports(UpdateFeaturesRequest, 1)
            request = UpdateFeaturesRequest(
                timeout_ms=int(self._config.request_timeout_ms),
                feature_updates=[
                    FeatureUpdateKey(feature=name, max_version_level=level, upgrade_type=upgrade_type)
                    if knows_types
                    else FeatureUpdateKey(
                        feature=name, max_version_level=level, allow_downgrade=upgrade_type != UPGRADE
                    )
                    for name, level in levels.items()
                ],
                validate_only=validate_only,
            )
            answer = await connection.call(request, UpdateFeaturesResponse, self._config.request_timeout_ms)
            self._redirect(await self._reach(), [answer.error_code])
            return answer

        response = await self._until(attempt)
        check(response.error_code, response.error_message, "features")
        for each in response.results:
            check(each.error_code, each.error_message, f"feature {each.feature!r}")
