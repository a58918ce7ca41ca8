"""The schema of a cluster file. Frozen structs, unknown keys refused; every default stands here and nowhere else,
except those of keys that belong to one transport. cluster_schema.py adds what stands in tables.

deploy/clusters/example.yaml shows each key with its default and its meaning; a test holds the two together.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, TypeVar

import msgspec
from msgspec import Meta

from common.errors import ConfigError

Port = Annotated[int, Meta(ge=0, le=65535)]
Positive = Annotated[int, Meta(ge=1)]
Fraction = Annotated[float, Meta(gt=0, le=0.98)]  # of a GPU: the driver keeps some for itself
NotNegative = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(gt=0, le=86_400)]
NodeName = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9-]{0,40}\Z")]  # $ would allow a newline

Placement = Literal["round_robin", "least_loaded"]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all sections: strict and immutable."""


class Model(Section, frozen=True, kw_only=True):
    """Which checkpoint is served."""

    path: str  # Hugging Face directory; relative paths are relative to the cluster file
    served_name: str | None = None  # `model` in the API; default: the directory's name
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = (
        "auto"  # auto: float32 on CPU, the checkpoint's on GPU
    )
    max_model_len: Annotated[int, Meta(ge=2)] | None = (
        None  # tokens per request in all; default: the model's maximum
    )
    chat_template: str | None = (
        None  # Jinja file in place of the model's own template; relative to the cluster file
    )
    manifest: str | None = None  # list of SHA-256 sums that the files of `path` are held against at start
    # directories that model and draft must lie in once links are followed; (): anywhere
    allowed_roots: tuple[str, ...] = ()


class Kv(Section, frozen=True, kw_only=True):
    """The paged KV cache; equal on all nodes."""

    page_size: Annotated[int, Meta(ge=1, le=1024)] = 16  # tokens per page


class PlacementSection(Section, frozen=True, kw_only=True):
    """How the router chooses nodes."""

    prefill: Placement = "least_loaded"
    decode: Placement = "least_loaded"


class Images(Section, frozen=True, kw_only=True):
    """Images in prompts, where the model takes them."""

    max_count: Annotated[int, Meta(ge=1, le=256)] = 16  # of one request
    max_bytes: Annotated[int, Meta(ge=1, le=15 << 20)] = 10 * 1024 * 1024  # of one image, as a file
    max_request_bytes: Positive = 20 * 1024 * 1024  # of all images of one request
    max_pixels: Annotated[int, Meta(ge=1, le=64_000_000)] = 16_000_000  # of one image, decoded
    max_held_mib: Positive = 512  # of all requests in flight; more are answered 503
    fetch_hosts: tuple[str, ...] = ()  # https hosts that images are fetched from; (): data URLs alone
    fetch_timeout: Seconds = 10.0  # of one image, from look-up to last byte


class Tls(Section, frozen=True, kw_only=True):
    """HTTPS, from version 1.2 on. Paths are relative to the cluster file; SIGHUP reads the files again."""

    cert: str | None = None  # PEM: the certificate and what leads to its root; None: plain HTTP
    key: str | None = None  # PEM
    client_ca: str | None = None  # PEM: clients need a certificate that it has signed


class Router(Section, frozen=True, kw_only=True):
    """HTTP and placement."""

    host: str = "127.0.0.1"
    port: Port = 8000
    tls: Tls = Tls()
    admin: str = "auto"  # where operators ask; auto: a Unix socket in the run directory
    allowed_hosts: tuple[
        str, ...
    ] = ()  # without API keys: names of this router beside loopback and its address
    cors_origins: tuple[str, ...] = ()  # web pages that may use the API from a browser
    max_connections_per_client: Positive = 1024  # of one address; more are closed
    control_address: str = (
        "auto"  # ZMQ address that nodes connect to; auto: an ipc socket in the run directory
    )
    placement: PlacementSection = PlacementSection()
    max_attempts: Annotated[int, Meta(ge=1, le=10)] = (
        3  # failed placements of one request before the client sees an error
    )
    max_requests: Positive = 4096  # in flight; more are answered 503 with Retry-After
    max_body_bytes: Positive = 10 * 1024 * 1024
    max_queued_mib: Positive = 512  # of messages that wait for one node, which then counts as out of reach
    images: Images = Images()
    request_timeout: Seconds = 600.0
    queue_wait: Seconds = 30.0  # how long a request waits for room on the decode nodes before 503
    max_crashes: Annotated[int, Meta(ge=0, le=100)] = (
        2  # of nodes under one request, which is then refused for some minutes; 0: never refuse
    )
    retry_ratio: Annotated[float, Meta(ge=0, le=1)] = 0.2  # repeated retries per request, beyond a few
    placement_wait: Seconds = 10.0  # how long a request waits for a node that is expected back before 503


class PrefillNode(Section, frozen=True, kw_only=True):
    """One prefill process."""

    name: NodeName
    device: str = "cpu"
    peer_address: str = "auto"  # ZMQ address that decode nodes connect to; auto: ipc in the run directory


class DecodeNode(Section, frozen=True, kw_only=True):
    """One decode process."""

    name: NodeName
    device: str = "cpu"
    host: str = (
        "127.0.0.1"  # transports tcp and nixl: address that the node's socket for prefill nodes binds to
    )
    bulk_port: Port = 0  # its port; 0 takes a free one


_N = TypeVar("_N", PrefillNode, DecodeNode)


class PrefillSection(Section, frozen=True, kw_only=True):
    """What all prefill nodes share."""

    CPU_POOL_TOKENS: ClassVar[int] = 32_768
    sees: ClassVar[bool] = True  # runs the vision part of a model that has one
    nodes: Annotated[tuple[PrefillNode, ...], Meta(min_length=1, max_length=256)] = (
        PrefillNode(name="prefill-0"),
    )
    pool_tokens: Positive | Literal["auto"] = (
        "auto"  # KV pool of each node; auto: CPU_POOL_TOKENS, or on a GPU what memory_fraction leaves
    )
    memory_fraction: Fraction = 0.9  # of its GPU: what a node takes in all where pool_tokens is auto
    chunk_tokens: Positive = 2048  # token budget of one forward, shared by all prompts in it
    max_batch: Positive = 64  # prompts in one forward
    max_queue: Positive = 1024  # waiting requests; more are refused
    graphs: Literal["auto", "breakable", "piecewise", "none"] = (
        "auto"  # of the prompt forward; auto: breakable on GPUs, none on CPUs
    )
    compiler: Literal["eager", "inductor"] | None = (
        None  # of piecewise graphs, and of no others: eager keeps our kernels (default), inductor writes its own
    )
    enforce_graphs: bool = (
        False  # whatever the rules say at start-up, on a CPU too (there on a tape): for tests
    )
    prefix_cache: bool = True
    image_cache_mib: NotNegative = 256  # device memory for the embeddings of images, by their content

    @property
    def image_bytes(self) -> int:
        """Device memory that a model with a vision part takes on top."""
        return self.image_cache_mib << 20


class DecodeSection(Section, frozen=True, kw_only=True):
    """What all decode nodes share."""

    CPU_POOL_TOKENS: ClassVar[int] = 65_536
    sees: ClassVar[bool] = False  # images end on the prefill nodes
    image_bytes: ClassVar[int] = 0
    nodes: Annotated[tuple[DecodeNode, ...], Meta(min_length=1, max_length=256)] = (
        DecodeNode(name="decode-0"),
    )
    pool_tokens: Positive | Literal["auto"] = "auto"
    memory_fraction: Fraction = 0.9
    max_running: Annotated[int, Meta(ge=1, le=4096)] = 64  # requests in one step
    max_transferring: Positive = 64  # reservations beyond the running ones
    max_queue: Positive = 1024
    reserved_tokens: NotNegative = (
        256  # kept free per active request at admission, at most what it may still emit
    )
    skip_ahead: NotNegative = 8  # how often later, smaller requests may pass one that does not fit
    graphs: Literal["auto", "full", "none"] = "auto"  # of the decode step; auto: on GPUs only
    prefix_cache: bool = True
    backup_mib: NotNegative = (
        1024  # host memory for the KV of retracted requests; beyond it they are prefilled again
    )
    read_results: Literal["when_ready", "one_behind"] = (
        "when_ready"  # one_behind: CPU nodes, too, launch step t+1 before they read step t, as GPU nodes always do
    )


class Speculation(Section, frozen=True, kw_only=True):
    """How decode nodes guess tokens that one forward of the model then verifies; the output stays the same."""

    # A name from the table of algorithms (common/speculation). none: plain decoding; ngram: what followed the last time
    # that a text ended alike; the others have a draft model.
    algorithm: str = "none"
    draft_model_path: str | None = (
        None  # Hugging Face directory: an EAGLE-1/2 or EAGLE-3 head or MTP modules for this model, or a small model
    )
    draft_manifest: str | None = None  # as model.manifest, for draft_model_path
    steps: Annotated[int, Meta(ge=1, le=31)] = (
        3  # drafts in a row: at most steps + 1 tokens come of one forward
    )
    topk: Annotated[int, Meta(ge=1, le=16)] = 1  # eagle, eagle3: branches of a draft tree; 1: a chain
    adaptive: Literal["none", "auto"] = (
        "none"  # auto: as many drafts as give the most tokens per second, by timed rounds and what is accepted
    )
    draft_tokens: Annotated[int, Meta(ge=2, le=128)] | None = (
        None  # tokens verified at once; steps + 1 for a chain, to be given for a tree
    )

    @property
    def nodes(self) -> int:
        """Tokens of a request that one forward verifies, its last drawn token included."""
        return self.steps + 1 if self.draft_tokens is None else self.draft_tokens


class Transfer(Section, frozen=True, kw_only=True):
    """How KV pages and handoff records move. Transports add keys of their own, see transports.py."""

    # A name from the table of transports; auto: the first one there that moves pages between these nodes.
    transport: str = "auto"
    layers: bool = False  # cuda_ipc and shm: pages leave layer by layer during their forward, not after it
    verify_checksums: bool = True  # of every page, on arrival; what it costs: tests/bench/transfer.py
    slots_timeout: Seconds = 5.0  # prefill node: no pages, and no word that the request waits for them
    first_page_timeout: Seconds = 5.0  # decode node: no page, and no word that the prompt is worked on
    stall_timeout: Seconds = 3.0  # either side: bytes are on the way, and none moves


class Health(Section, frozen=True, kw_only=True):
    """How soon the cluster notices."""

    heartbeat_interval: Seconds = 0.25
    node_timeout: Seconds = 2.5  # no heartbeat for so long: the node is lost
    # a main loop is hung so long past the work that it announced; idle loops turn every 100 ms
    loop_timeout: Annotated[float, Meta(ge=1, le=86_400)] = 3.0
    # after so long a hung node ends its process, with stacks in its log, to be started again; 0: it does not
    hang_timeout: Annotated[float, Meta(ge=0, le=86_400)] = 30.0
    router_timeout: Seconds = 2.0  # no echo from the router: a node drops the router's requests
    drain_timeout: Seconds = 30.0
    # in which a node that went is expected back: requests wait for its role up to router.placement_wait
    return_window: Seconds = 60.0
    slow_start: Annotated[float, Meta(ge=0, le=3600)] = 10.0  # in which a new node's share of requests rises

    @property
    def hung_limit(self) -> float:
        """Seconds past its announced work after which a main loop's process ends; 0: never."""
        return self.loop_timeout + self.hang_timeout if self.hang_timeout else 0.0


class Security(Section, frozen=True, kw_only=True):
    """States who may use the API, and who may speak on the links between processes."""

    api_keys: str | None = None  # file of the hashed API keys, see deploy/api_key; None: clients need no key
    share_prefix_cache: bool = (
        False  # among all keys: faster, but a client can find out what others have sent
    )
    open_metrics: bool = False  # /metrics needs no key
    plain_http: bool = (
        False  # router.host off loopback without router.tls: a proxy in front has the certificate
    )
    open_http: bool = False  # router.host off loopback without API keys: whoever reaches it may use it
    # Directory made by deploy/keygen; without it sockets bind to loopback only, with keys made in the run directory.
    keys: str | None = None
    isolated_network: bool = False  # only these nodes reach transfer.nixl_devices; transport nixl asks for it


class Process(Section, frozen=True, kw_only=True):
    """Threads, logs and debugging of every process."""

    run_dir: str = "auto"  # sockets, pids, logs; auto: 0700 under $XDG_RUNTIME_DIR or /tmp
    threads: NotNegative = 1  # torch threads per node on CPU; 0: torch's default
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_max_mib: Positive = 64  # of each log that deploy/up opens; one rotated file is kept
    event_log: Annotated[str, Meta(min_length=1)] = (
        "none"  # steps of every request; auto: events/ in run_dir; or a directory
    )
    poison_graphs: bool = (
        False  # NaN and maximum ids in the padding of all graphs before each replay: for tests
    )


class Cluster(Section, frozen=True, kw_only=True):
    """A whole cluster file."""

    model: Model
    kv: Kv = Kv()
    router: Router = Router()
    prefill: PrefillSection = PrefillSection()
    decode: DecodeSection = DecodeSection()
    speculation: Speculation = Speculation()
    transfer: Transfer = Transfer()
    health: Health = Health()
    security: Security = Security()
    process: Process = Process()

    def prefill_node(self, name: str) -> PrefillNode:
        return _named(self.prefill.nodes, name, "prefill")

    def decode_node(self, name: str) -> DecodeNode:
        return _named(self.decode.nodes, name, "decode")


def _named(nodes: tuple[_N, ...], name: str, role: str) -> _N:
    for node in nodes:
        if node.name == name:
            return node
    known = ", ".join(n.name for n in nodes)
    raise ConfigError(f"{role}.nodes", f"no node is called {name!r}; the file has: {known}")
