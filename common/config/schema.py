"""The schema of a cluster file: frozen structs that refuse unknown keys.

Every default is defined here, except those of keys that belong to one transport. cluster_schema.py adds the names and
keys of tables. deploy/clusters/example.yaml shows each key with its default and its meaning; a test keeps the two in
agreement.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, TypeVar

import msgspec
from msgspec import Meta

from common.config.movable_schema import MovableSection
from common.config.section import Fraction, NodeName, NotNegative, Port, Positive, Seconds, Section
from common.config.section_kv_events import KvEventsSection
from common.config.section_process import Process
from common.errors import ConfigError
from common.node_names import NodeNames

Quantization = Literal["none", "fp8"]
PrefixCaching = bool | Literal["auto"]


class Model(Section, frozen=True, kw_only=True):
    """The checkpoint that is served."""

    path: str  # Hugging Face directory; relative paths are relative to the cluster file
    # `model` in the API; default: the directory's name
    served_name: Annotated[str, Meta(min_length=1)] | None = None
    # auto: float32 on CPUs, the checkpoint's dtype on GPUs
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    # fp8: unquantised weights are quantised while they are loaded; none: weights are as the checkpoint stores them
    quantization: Quantization = "none"
    # Maximum tokens per request, prompt and output together; default: the model's maximum.
    max_model_len: Annotated[int, Meta(ge=2)] | None = None
    # Jinja file that replaces the model's own template; relative to the cluster file.
    chat_template: str | None = None
    # Variables of the chat template that requests may set.
    chat_template_kwargs: tuple[Annotated[str, Meta(pattern=r"^[A-Za-z][A-Za-z0-9_]{0,63}\Z")], ...] = (
        "enable_thinking",
        "thinking",
        "reasoning_effort",
        "thinking_budget",
        "preserve_thinking",
        "clear_thinking",
        "date_string",
        "tools_in_user_message",
    )
    # How answers mark reasoning and tool calls; auto: the checkpoint's response template or its family's.
    response_template: Annotated[str, Meta(min_length=1)] = "auto"
    manifest: str | None = None  # list of SHA-256 sums against which the files of `path` are checked at start
    # Whether requests may ask for hidden states (return_hidden_states).
    return_hidden_states: bool = False
    # Hidden states of one answer, in float32; a request that may need more is refused.
    hidden_states_mib: Annotated[int, Meta(ge=1, le=256)] = 32
    # Directories that must contain model and draft after links are resolved; (): anywhere.
    allowed_roots: tuple[str, ...] = ()


class Kv(Section, frozen=True, kw_only=True):
    """The paged KV cache; equal on all nodes."""

    page_size: Annotated[int, Meta(ge=1, le=1024)] = 16  # tokens per page
    # How pages store keys and values; auto: in the dtype of the model.
    dtype: Literal["auto", "fp8"] = "auto"


class PlacementSection(Section, frozen=True, kw_only=True):
    """The choice of nodes by the router."""

    # names from the table of policies (common/placements.py)
    prefill: str = "cache_aware"
    decode: str = "cache_aware"
    # A node whose cost is this many milliseconds higher is chosen e times less often; 0: the lowest cost always is.
    temperature_ms: Annotated[float, Meta(ge=0, le=1e6)] = 0.0
    # How a client's session (header X-Session-Id) keeps its nodes: for how long after its last request, and while a
    # first token comes at most this much later than elsewhere.
    session_ttl: Seconds = 300.0
    session_ms: Annotated[float, Meta(ge=0, le=1e6)] = 500.0
    # cache_aware, cache_events: tokens of a block, the memory of both indexes, and the life of an unused block.
    block_tokens: Annotated[int, Meta(ge=16, le=4096)] = 64
    index_mib: Annotated[int, Meta(ge=1, le=65_536)] = 256
    prefix_ttl: Seconds = 600.0
    # Cached prefixes and sessions attract no prompt to a node whose queue is this much longer than the shortest one.
    max_imbalance_ms: Annotated[float, Meta(ge=0, le=1e6)] = 5000.0
    # New requests are answered 503 while all nodes of a role are busy; null: never. A prefill node is busy if it
    # predicts a later first token, a decode node if requests use a larger share of its pool.
    busy_first_token_ms: Annotated[float, Meta(gt=0, le=1e6)] | None = None
    busy_pool_share: Annotated[float, Meta(gt=0, le=1)] | None = None


class ImagesSection(Section, frozen=True, kw_only=True):
    """Images in prompts, if the model takes them."""

    max_count: Annotated[int, Meta(ge=1, le=256)] = 16  # per request
    max_bytes: Annotated[int, Meta(ge=1, le=15 << 20)] = 10 * 1024 * 1024  # per image, as a file
    max_request_bytes: Positive = 20 * 1024 * 1024  # all images of one request
    max_pixels: Annotated[int, Meta(ge=1, le=64_000_000)] = 16_000_000  # per image, decoded
    max_held_mib: Positive = 512  # all requests in flight; more are answered 503
    fetch_hosts: tuple[str, ...] = ()  # https hosts that images are fetched from; (): only data URLs
    fetch_timeout: Seconds = 10.0  # per image, from DNS lookup to last byte


class Tls(Section, frozen=True, kw_only=True):
    """HTTPS, from version 1.2 on. Paths are relative to the cluster file; SIGHUP reads the files again."""

    cert: str | None = None  # PEM: the certificate and its chain; None: plain HTTP
    key: str | None = None  # PEM
    client_ca: str | None = None  # PEM: clients need a certificate signed by it


class RouterSection(Section, frozen=True, kw_only=True):
    """HTTP and placement."""

    host: str = "127.0.0.1"
    port: Port = 8000
    processes: Annotated[int, Meta(ge=1, le=64)] = 1  # on each host; they share the port
    tls: Tls = Tls()
    admin: str = "auto"  # listener for operators; auto: a Unix socket in the run directory
    # Without API keys: accepted Host headers in addition to loopback names and the router's address.
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()  # web pages that may use the API from a browser
    max_connections_per_client: Positive = 1024  # per client address; more are closed
    # For all clients together. For one more, the connection that has been without a request the longest is closed.
    max_connections: Positive = 4352
    # ZMQ address that nodes connect to; auto: an ipc socket in the run directory. A list has one per host with routers.
    # Further processes of a host follow the first one: the next ports, or the path with a number. dns://NAME:PORT: each
    # address of this name is a router. endpointslices://SERVICE:PORT: each endpoint of this Service is one.
    control_address: str | Annotated[tuple[str, ...], Meta(min_length=1, max_length=64)] = "auto"
    # Most routers to which a node has links, if they are found.
    found_routers: Annotated[int, Meta(ge=1, le=64)] = 4
    placement: PlacementSection = PlacementSection()
    # Longest time that the first token of a stream is kept back, to leave with the second one if that comes sooner.
    first_token_hold_ms: Annotated[float, Meta(ge=0, le=200)] = 0.0
    # Failed placements of one request before the client gets an error.
    max_attempts: Annotated[int, Meta(ge=1, le=10)] = 3
    # Uncached tokens of a prompt that a movable decode node may compute itself, where that is predicted to be faster.
    local_prefill: NotNegative = 0
    max_requests: Positive = 4096  # in flight; more are answered 503 with Retry-After
    # Names under which answers show the reasoning of the model.
    reasoning_fields: Annotated[
        tuple[Literal["reasoning_content", "reasoning"], ...], Meta(min_length=1, max_length=2)
    ] = ("reasoning_content",)
    max_body_bytes: Positive = 10 * 1024 * 1024
    strict_fields: bool = False  # refuse unknown request fields instead of ignoring them
    max_queued_mib: Positive = 512  # messages waiting for one node, which beyond it counts as unreachable
    images: ImagesSection = ImagesSection()
    request_timeout: Seconds = 600.0
    queue_wait: Seconds = 30.0  # time that a request waits for room on the decode nodes before 503
    # Node crashes under one request, after which it is refused for some minutes; 0: never refuse.
    max_crashes: Annotated[int, Meta(ge=0, le=100)] = 2
    retry_ratio: Annotated[float, Meta(ge=0, le=1)] = 0.2  # repeated retries per request, beyond a few
    placement_wait: Seconds = 10.0  # time that a request waits for a node that is expected back before 503
    # Collector that gets a trace of each request (OTLP over HTTP, such as http://host:4318); empty: the one that
    # OTEL_EXPORTER_OTLP_ENDPOINT names, if any.
    otlp_endpoint: str = ""


class NodeEntry(Section, frozen=True, kw_only=True):
    """One node: a process for each of its ranks. A name like `decode-*` stands for nodes that join by themselves."""

    name: NodeName
    # Only for a name with *: how many of these nodes may be there at the same time.
    count: Annotated[int, Meta(ge=1, le=256)] | None = None
    device: str = "cpu"
    # Ranks that divide the model; on GPUs they take `device` and the ones after it.
    tensor_parallel: Literal[1, 2, 4, 8] = 1
    devices: tuple[str, ...] = ()  # one for each rank, in place of the two keys above
    expert_parallel: bool = False  # each rank has some experts whole; false: a part of every expert

    @property
    def rank_devices(self) -> tuple[str, ...]:
        """The device of each of its ranks."""
        if self.devices:
            return self.devices
        kind, _, first = self.device.partition(":")
        if kind == "cpu" or self.tensor_parallel == 1:
            return (self.device,) * self.tensor_parallel
        return tuple(f"{kind}:{int(first or 0) + rank}" for rank in range(self.tensor_parallel))

    @property
    def on_gpu(self) -> bool:
        return self.rank_devices[0] != "cpu"


class PrefillNodeEntry(NodeEntry, frozen=True, kw_only=True):
    """One prefill node."""

    # ZMQ address that decode nodes connect to; auto: ipc in the run directory. The host `own` is process.address.
    peer_address: str = "auto"


class DecodeNodeEntry(NodeEntry, frozen=True, kw_only=True):
    """One decode node."""

    # Transports tcp and nixl: address to which the node's socket for prefill nodes binds; own: process.address.
    host: str = "127.0.0.1"
    bulk_port: Port = 0  # port of that socket; 0: any free port


_N = TypeVar("_N", PrefillNodeEntry, DecodeNodeEntry)


class PrefillSection(Section, frozen=True, kw_only=True):
    """Keys that all prefill nodes share."""

    CPU_POOL_TOKENS: ClassVar[int] = 32_768
    runs_vision: ClassVar[bool] = True  # runs the vision part of a model that has one
    nodes: Annotated[tuple[PrefillNodeEntry, ...], Meta(min_length=1, max_length=256)] = (
        PrefillNodeEntry(name="prefill-0"),
    )
    # KV pool of each node; auto: CPU_POOL_TOKENS, or on a GPU what memory_fraction leaves.
    pool_tokens: Positive | Literal["auto"] = "auto"
    memory_fraction: Fraction = 0.9  # share of its GPU that a node takes if pool_tokens is auto
    # Most tokens of one forward; rounded for models that compute prompts on a grid. Forwards are smaller where first
    # tokens come sooner by that.
    chunk_tokens: Annotated[int, Meta(ge=1, le=1_048_576)] = 2048
    max_batch: Positive = 64  # prompts in one forward
    max_queue: Positive = 1024  # waiting requests; more are refused
    # Graphs of the prompt forward; auto: breakable on GPUs, none on CPUs.
    graphs: Literal["auto", "breakable", "piecewise", "none"] = "auto"
    # Compiler of piecewise graphs only: eager keeps tandem's kernels (default), inductor generates its own.
    compiler: Literal["eager", "inductor"] | None = None
    # Use graphs whatever the rules say at start-up, also on a CPU (there on a tape); for tests.
    enforce_graphs: bool = False
    # auto: on, except for a model with a state per request if state_snapshots is 0.
    prefix_cache: PrefixCaching = "auto"
    # States of cached prefixes, for a model with a state per request; 0: no prefix cache; auto: more in a larger pool.
    state_snapshots: Annotated[int, Meta(ge=0, le=65_536)] | Literal["auto"] = "auto"
    # Host memory of each node for cached prefixes, in addition to those in its pool; 0: none.
    host_mib: NotNegative = 0
    image_cache_mib: NotNegative = 256  # device memory for the embeddings of images, keyed by content

    @property
    def image_bytes(self) -> int:
        """Device memory that a model with a vision part takes in addition."""
        return self.image_cache_mib << 20


class DecodeSection(Section, frozen=True, kw_only=True):
    """Keys that all decode nodes share."""

    CPU_POOL_TOKENS: ClassVar[int] = 65_536
    runs_vision: ClassVar[bool] = False  # images are used only on prefill nodes
    image_bytes: ClassVar[int] = 0
    nodes: Annotated[tuple[DecodeNodeEntry, ...], Meta(min_length=1, max_length=256)] = (
        DecodeNodeEntry(name="decode-0"),
    )
    pool_tokens: Positive | Literal["auto"] = "auto"
    memory_fraction: Fraction = 0.9
    max_running: Annotated[int, Meta(ge=1, le=4096)] = 64  # requests in one step
    max_transferring: Positive = 64  # reservations in addition to the running requests
    max_queue: Positive = 1024
    # Tokens kept free per active request at admission, at most what it may still emit.
    reserved_tokens: NotNegative = 256
    skip_ahead: NotNegative = 8  # how often smaller, later requests may overtake one that does not fit
    graphs: Literal["auto", "full", "none"] = "auto"  # for the decode step; auto: on GPUs only
    prefix_cache: PrefixCaching = "auto"
    # Host memory of each node for cached prefixes, in addition to those in its pool; 0: none.
    host_mib: NotNegative = 0
    # Host memory for the KV of retracted requests, of that in host_mib if there is any; others are prefilled again.
    backup_mib: NotNegative = 1024
    # one_behind: CPU nodes, too, launch step t+1 before they read step t, as GPU nodes always do.
    read_results: Literal["when_ready", "one_behind"] = "when_ready"
    state_snapshots: ClassVar[int] = 0  # the state of each request comes from its prefill node


class Speculation(Section, frozen=True, kw_only=True):
    """The drafts of decode nodes, which one forward of the model verifies; the output stays the same."""

    # A name from the table of algorithms (common/speculation). none: plain decoding; ngram: what followed the last
    # time that the text ended in the same way; the others have a draft model.
    algorithm: str = "none"
    # Hugging Face directory: an EAGLE-1/2 or EAGLE-3 head or MTP modules for this model, or a small model.
    draft_model_path: str | None = None
    draft_manifest: str | None = None  # like model.manifest, for draft_model_path
    draft_quantization: Quantization = "none"  # like model.quantization, for draft_model_path
    # Drafts in a row: one forward yields at most steps + 1 tokens.
    steps: Annotated[int, Meta(ge=1, le=31)] = 3
    topk: Annotated[int, Meta(ge=1, le=16)] = 1  # eagle, eagle3: branches of a draft tree; 1: a chain
    # auto: the number of drafts that yields the most tokens per second, by timed rounds and acceptance.
    adaptive: Literal["none", "auto"] = "none"
    # Tokens verified at once; steps + 1 for a chain, required for a tree.
    draft_tokens: Annotated[int, Meta(ge=2, le=128)] | None = None
    # Verify tokens that a grammar forces as drafts, with any algorithm, also none.
    forced_tokens: bool = True

    @property
    def nodes(self) -> int:
        """Tokens of a request that one forward verifies, including its last drawn token."""
        return self.steps + 1 if self.draft_tokens is None else self.draft_tokens


class Transfer(Section, frozen=True, kw_only=True):
    """The transfer of KV pages and handoff records. Transports add keys of their own, see transports.py."""

    # A name from the table of transports; auto: the first one that can move pages between these nodes.
    transport: str = "auto"
    layers: bool = False  # cuda_ipc and shm: send pages layer by layer during their forward, not after it
    # Verify every page on arrival; the cost is measured by tests/bench/transfer.py.
    verify_checksums: bool = True
    slots_timeout: Seconds = 5.0  # prefill node: no pages, and no sign that the request waits for them
    first_page_timeout: Seconds = 5.0  # decode node: no page, and no sign that the prompt is processed
    stall_timeout: Seconds = 3.0  # either side: bytes are in flight, and none makes progress


class Health(Section, frozen=True, kw_only=True):
    """The deadlines by which the cluster notices failures."""

    heartbeat_interval: Seconds = 0.25
    node_timeout: Seconds = 2.5  # a node without a heartbeat for this long is lost
    # Time past its announced work after which a main loop counts as hung; idle loops turn every 100 ms.
    loop_timeout: Annotated[float, Meta(ge=1, le=86_400)] = 3.0
    # Time after which a hung node ends its process, with stacks in its log, to be restarted; 0: never.
    hang_timeout: Annotated[float, Meta(ge=0, le=86_400)] = 30.0
    # Time without progress after which a node that starts ends its process, with stacks in its log; 0: never.
    start_hang_timeout: Annotated[float, Meta(ge=0, le=86_400)] = 900.0
    router_timeout: Seconds = 2.0  # time without an echo after which a node drops the router's requests
    drain_timeout: Seconds = 30.0
    # Time in which a lost node is expected back: requests wait for its role up to router.placement_wait.
    return_window: Seconds = 60.0
    # Time over which a new node's share of requests rises.
    slow_start: Annotated[float, Meta(ge=0, le=3600)] = 10.0

    @property
    def hung_limit(self) -> float:
        """Seconds past its announced work after which a node's process ends; 0: never."""
        return self.loop_timeout + self.hang_timeout if self.hang_timeout else 0.0


class Security(Section, frozen=True, kw_only=True):
    """Access to the API and protection of the links between processes."""

    api_keys: str | None = None  # file of the hashed API keys, see deploy/api_key; None: clients need no key
    # Share cached prefixes among all keys: faster, but a client can find out what others have sent.
    share_prefix_cache: bool = False
    open_metrics: bool = False  # /metrics needs no key
    # router.host is not loopback, without router.tls: a proxy in front terminates TLS.
    plain_http: bool = False
    # Permits a router.host that is not loopback without API keys: everyone who can reach it may use it.
    open_http: bool = False
    # Directory made by deploy/keygen; without it sockets bind only to loopback, with keys made in the run directory.
    keys: str | None = None
    # Only these nodes reach transfer.nixl_devices and kv_events.host; transport nixl and events off loopback need it.
    isolated_network: bool = False


class Cluster(Section, frozen=True, kw_only=True):
    """A whole cluster file."""

    model: Model
    kv: Kv = Kv()
    router: RouterSection = RouterSection()
    prefill: PrefillSection = PrefillSection()
    decode: DecodeSection = DecodeSection()
    movable: MovableSection = MovableSection()
    speculation: Speculation = Speculation()
    transfer: Transfer = Transfer()
    health: Health = Health()
    kv_events: KvEventsSection = KvEventsSection()
    security: Security = Security()
    process: Process = Process()

    def prefill_node(self, name: str) -> PrefillNodeEntry:
        return _named(self.prefill.nodes, name, "prefill")

    def decode_node(self, name: str) -> DecodeNodeEntry:
        return _named(self.decode.nodes, name, "decode")

    def starts_as(self, name: str, role: str) -> bool:
        """Return whether the node `name` of `role` starts in this role: every node does, except movable ones."""
        return self.movable.role_of(name) in (None, role)


def _named(nodes: tuple[_N, ...], name: str, role: str) -> _N:
    """Return the entry for the node `name`, with that name. Raises ConfigError."""
    entry = NodeNames.of(node.name for node in nodes).entry(name)
    for node in nodes:
        if node.name == entry:
            return msgspec.structs.replace(node, name=name, count=None)
    known = ", ".join(n.name for n in nodes)
    raise ConfigError(f"{role}.nodes", f"no node is called {name!r}; the file has: {known}")
