"""Admin calls about API versions and features, with changes of finalized levels (KIP-584).

Every broker answers for its own versions. Finalized levels belong to the cluster, and the
controller changes them.
"""

from __future__ import annotations

from collections.abc import Mapping

from tidelog.client.admin.base import AdminBase, raise_on_error
from tidelog.client.arguments import INT16_MAX, as_choice, as_flag, as_int, as_mapping, as_text
from tidelog.client.model import BrokerVersions
from tidelog.client.network.connection import Connection
from tidelog.protocol.messages.api_versions import ApiVersionsRequest, ApiVersionsResponse
from tidelog.protocol.messages.update_features import FeatureUpdateKey, UpdateFeaturesRequest, UpdateFeaturesResponse
from tidelog.version import __version__

UPGRADE, SAFE_DOWNGRADE, UNSAFE_DOWNGRADE = 1, 2, 3


class FeaturesAdmin(AdminBase):
    """The version and feature calls of `Admin`."""

    async def describe_versions(self, broker_id: int | None = None) -> BrokerVersions:
        """The APIs and features of a broker; without an id, of any.

        Raises KafkaError: NETWORK_EXCEPTION, BROKER_NOT_AVAILABLE.
        """

        if broker_id is not None:
            broker_id = as_int("broker_id", broker_id)

        async def ask(connection: Connection) -> ApiVersionsResponse:
            request = ApiVersionsRequest(client_software_name="tidelog", client_software_version=__version__)
            return await connection.call(request, ApiVersionsResponse, self._config.request_timeout_ms)

        async def attempt() -> ApiVersionsResponse:
            if broker_id is None:
                answer = await (await self._connected_cluster()).ask_any(ask)
            else:
                answer = await ask(await self._connection_to(broker_id))
            raise_on_error(
                answer.error_code, None, "versions" if broker_id is None else f"versions of broker {broker_id}"
            )
            return answer

        answer = await self._retry(attempt)
        return BrokerVersions(
            {api.api_key: (api.min_version, api.max_version) for api in answer.api_keys},
            {feature.name: (feature.min_version, feature.max_version) for feature in answer.supported_features},
            {feature.name: feature.max_version_level for feature in answer.finalized_features},
            answer.finalized_features_epoch,
        )

    async def update_features(
        self, levels: Mapping[str, int], *, upgrade_type: int = UPGRADE, validate_only: bool = False
    ) -> None:
        """Finalize all of these levels or none. Level 0 disables a feature.

        `upgrade_type` is one of `tidelog.client.admin.features`: UPGRADE (1), SAFE_DOWNGRADE (2: refused
        when metadata would be lost) or UNSAFE_DOWNGRADE (3). Raises KafkaError, such as
        INVALID_UPDATE_VERSION or FEATURE_UPDATE_FAILED.
        """

        checked = {
            as_text("a key of levels", name): as_int(f"the level of {name!r}", level, 0, INT16_MAX)
            for name, level in as_mapping("levels", levels, "numbers by feature").items()
        }
        as_choice("upgrade_type", upgrade_type, (UPGRADE, SAFE_DOWNGRADE, UNSAFE_DOWNGRADE))
        as_flag("validate_only", validate_only)

        async def attempt() -> UpdateFeaturesResponse:
            connection = await self._controller()
            supports_types = connection.supports(UpdateFeaturesRequest, 1)
            request = UpdateFeaturesRequest(
                timeout_ms=int(self._config.request_timeout_ms),
                feature_updates=[
                    FeatureUpdateKey(feature=name, max_version_level=level, upgrade_type=upgrade_type)
                    if supports_types
                    else FeatureUpdateKey(
                        feature=name, max_version_level=level, allow_downgrade=upgrade_type != UPGRADE
                    )
                    for name, level in checked.items()
                ],
                validate_only=validate_only,
            )
            answer = await connection.call(request, UpdateFeaturesResponse, self._config.request_timeout_ms)
            self._redirect(await self._connected_cluster(), [answer.error_code])
            return answer

        response = await self._retry(attempt)
        raise_on_error(response.error_code, response.error_message, "features")
        for result in response.results:
            raise_on_error(result.error_code, result.error_message, f"feature {result.feature!r}")
