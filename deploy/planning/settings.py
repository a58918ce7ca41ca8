"""The planner's own YAML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from common.config.yaml_file import read_mapping
from common.errors import ConfigError
from common.kubernetes_api import CREDENTIALS
from deploy.planning.decision import Limits, RoleLimits

Milliseconds = Annotated[float, Meta(gt=0, le=600_000)]
Share = Annotated[float, Meta(gt=0, le=1)]
Below = Annotated[float, Meta(gt=0, lt=1)]
Seconds = Annotated[float, Meta(gt=0, le=86_400)]
# GROUP/VERSION/RESOURCE/NAME of something with the subresource `scale`: apps/v1/statefulsets/prefill
ScaleTarget = Annotated[str, Meta(pattern=r"^[a-z0-9.-]+/v[a-z0-9]+/[a-z]+/[a-z0-9][a-z0-9.-]*\Z")]


class RoleRange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The minimum and maximum number of nodes of a role."""

    min: Annotated[int, Meta(ge=1, le=4096)] = 1
    max: Annotated[int, Meta(ge=1, le=4096)] = 4096


class KubernetesTarget(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The objects whose replicas are set, and the API server."""

    prefill: ScaleTarget = "apps/v1/statefulsets/prefill"
    decode: ScaleTarget = "apps/v1/statefulsets/decode"
    namespace: str | None = None  # None: that of the pod's service account
    server: str | None = None  # URL of the API server; None: the pod's cluster
    credentials: str = str(CREDENTIALS)  # a directory with token and ca.crt


class PlannerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The keys of the file."""

    first_token_ms: Milliseconds
    gap_ms: Milliseconds
    quantile: Below = 0.9
    pool_share: Share = 0.9
    busy_share: Share = 0.8
    spare: Below = 0.8
    interval: Annotated[float, Meta(ge=0.5, le=3600)] = 5.0
    window: Annotated[int, Meta(ge=1, le=1000)] = 6
    cool_down: Seconds = 60.0
    change_timeout: Seconds = 900.0
    least_requests: Annotated[int, Meta(ge=1, le=1_000_000)] = 5
    prefill: RoleRange = RoleRange()
    decode: RoleRange = RoleRange()
    kubernetes: KubernetesTarget | None = None

    def limits(self) -> Limits:
        return Limits(
            first_token=self.first_token_ms / 1000,
            gap=self.gap_ms / 1000,
            pool_share=self.pool_share,
            busy_share=self.busy_share,
            spare=self.spare,
            window=self.window,
            cool_down=self.cool_down,
            roles={
                "prefill": RoleLimits(self.prefill.min, self.prefill.max),
                "decode": RoleLimits(self.decode.min, self.decode.max),
            },
        )


def read_settings(file: Path) -> PlannerSettings:
    """Read the file. Raises ConfigError, which names the key."""
    given = read_mapping(file)
    try:
        settings = msgspec.convert(given, PlannerSettings)
    except msgspec.ValidationError as error:
        raise ConfigError("", f"{file}: {error}") from error
    for role, each in (("prefill", settings.prefill), ("decode", settings.decode)):
        if each.min > each.max:
            raise ConfigError(f"{role}.min", f"{file}: {each.min} is over {role}.max, which is {each.max}")
    return settings
