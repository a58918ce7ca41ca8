"""Composition root of the router: builds all objects from the config. No other module reads the config."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from random import Random

import zmq

from common.checkpoint.chat_template_file import find_chat_template
from common.checkpoint.end_tokens import end_tokens
from common.checkpoint.model_config import ModelConfig, model_fingerprint
from common.checkpoint.model_manifest import check_manifests
from common.checkpoint.vision_config import VisionConfig
from common.config import Resolved
from common.config.router_processes import CONTROL, RouterProcess
from common.config.run_directory import control_addresses, event_directory, profile_directory
from common.config.schema import Cluster, DecodeSection, PrefillSection, RouterSection
from common.config.unread import refuse_unread, unread_by_models_without_state, unread_by_text_models
from common.errors import ConfigError, ModelError
from common.ipc import check_bind
from common.ipc.from_config import link_security
from common.kv_cache.layer_kinds import window_widths
from common.messages.identity import ROUTER_NAME, Role, new_incarnation
from common.node_names import FOUND
from common.observability.event_log import event_log
from common.observability.logs import Log
from router.app import RouterApp
from router.assemble import assemble
from router.dispatch.limits import DispatchLimits
from router.from_config import answer_style, http_plan, registration_rules, state_limit
from router.images.fetch_process import FetchProcess
from router.images.inspector import ImageInspector
from router.images.loader import ImageLimits, ImageLoader, RefusingImageLoader, VerifyingImageLoader
from router.nodes.placement import decode_cost, make_policy, prefill_cost, softened
from router.nodes.placement_rules import PlacementRules
from router.parts import ApiParts, ChildProcesses, ControlLink, Dispatching, NodeRules, Observation
from router.process.spawner import Spawner
from router.requests.checks import ServedModel
from router.requests.field_rules import UnknownFields
from router.text.pool import TextPool
from router.text.service import TextService
from router.tokens.tokenizer import Tokenizer
from router.tokens.tokenizer_info import tokenizer_info
from router.tracing.choice import make_traces


def build(resolved: Resolved, process: RouterProcess, log: Log) -> RouterApp:
    """Compose one router process. Raises ConfigError or ModelError, each naming the remedy."""
    cluster, path = resolved.cluster, resolved.model_path
    config = _model_config(resolved)
    tokenizer = _tokenizer(resolved, config, log)
    model = _served_model(resolved, config, tokenizer, log)
    shown = {path: {"value": value, "origin": origin} for path, value, origin in resolved.rows()}
    spawner = Spawner()
    images, body_bytes = _images(spawner, cluster.router, config.vision)
    template = resolved.chat_template_path
    if find_chat_template(path, template) is None:
        log.warning(
            "this model has no chat template: /v1/chat/completions is refused; set model.chat_template",
            model=str(path),
        )
    text_pool = TextPool(spawner, path, body_bytes, log, dict(resolved.manifests).get(path), template)
    texts = TextService(text_pool, tokenizer, UnknownFields(log, cluster.router.strict_fields))
    info = tokenizer_info(path, template)
    rules = _node_rules(resolved, model.max_model_len, config.vocab_size)
    http = http_plan(resolved, process, body_bytes, time.time, log)
    link = _control_link(resolved, process)
    loop = asyncio.get_running_loop()
    traces = make_traces(cluster.router.otlp_endpoint, model.name, log)
    events = event_log(event_directory(resolved), process.name, link.incarnation, log, loop.call_soon)
    try:
        return assemble(
            link,
            rules,
            _dispatching(cluster),
            Observation(
                log,
                model.name,
                events,
                shown,
                max_model_len=model.max_model_len,
                traces=traces,
                profiles=partial(profile_directory, resolved),
            ),
            model,
            ChildProcesses(spawner, text_pool, images),
            ApiParts(tokenizer, info, texts, images, cluster.router.max_requests),
            http,
        )
    except BaseException:
        events.close()
        link.security.close()
        link.context.destroy(linger=0)
        raise


def _model_config(resolved: Resolved) -> ModelConfig:
    """Read the model's headers, after its manifest was checked."""
    path = resolved.model_path
    # Only the manifest of the target, and without weights: the router reads just headers, and nodes check the draft.
    check_manifests([each for each in resolved.manifests if each[0] == path], weights=False)
    config = ModelConfig.load(path)
    if config.vision is None:
        refuse_unread(unread_by_text_models(resolved.cluster), resolved.origins)
    if not window_widths(config):
        refuse_unread(unread_by_models_without_state(resolved.cluster), resolved.origins)
    return config


def _tokenizer(resolved: Resolved, config: ModelConfig, log: Log) -> Tokenizer:
    path = resolved.model_path
    tokenizer = Tokenizer(path)
    added, others = tokenizer.beyond(config.vocab_size)
    if others:
        raise ModelError(
            f"{path}: the tokenizer has {others} tokens with ids above {config.vocab_size - 1}, the model's last one "
            "(vocab_size): it is for another model"
        )
    # The placeholder of an image has no embedding, and may lie outside the vocabulary.
    placeholder = -1 if config.vision is None else config.vision.image_token_id
    unknown = [text for text in added if tokenizer.token_to_id(text) != placeholder]
    if unknown:
        log.warning(
            "the model has no embeddings of some added tokens of its tokenizer: prompts with them are refused",
            model=str(path),
            tokens=", ".join(map(repr, unknown[:5])),
            count=len(unknown),
        )
    return tokenizer


def _served_model(resolved: Resolved, config: ModelConfig, tokenizer: Tokenizer, log: Log) -> ServedModel:
    section, path = resolved.cluster.model, resolved.model_path
    return ServedModel(
        name=section.served_name or path.name,
        path=str(path),
        created=int(time.time()),
        vocab_size=config.vocab_size,
        max_model_len=section.max_model_len or config.max_position_embeddings,
        eos_token_ids=end_tokens(path, config, tokenizer.token_to_id),
        defaults=config.default_sampling,
        vision=config.vision,
        answers=answer_style(resolved, tokenizer, log),
        states=state_limit(section, config.hidden_size),
    )


def _control_link(resolved: Resolved, process: RouterProcess) -> ControlLink:
    context = zmq.Context[zmq.Socket[bytes]]()
    security = link_security(context, resolved, ROUTER_NAME)
    address = control_addresses(resolved)[process.index]
    try:
        if address.startswith(FOUND):
            raise ConfigError(
                CONTROL,
                f"nodes find routers by {address}, and a router binds to an address of its own: set "
                "TANDEM_ROUTER_CONTROL_ADDRESS=tcp://0.0.0.0:PORT for it",
            )
        check_bind(address, CONTROL, security)
    except ConfigError:
        security.close()
        context.destroy(linger=0)
        raise
    queued_bytes = resolved.cluster.router.max_queued_mib << 20
    return ControlLink(context, address, new_incarnation(), security, queued_bytes)


def _node_rules(resolved: Resolved, max_model_len: int, vocab_size: int) -> NodeRules:
    cluster, health = resolved.cluster, resolved.cluster.health
    return NodeRules(
        registration_rules(resolved, max_model_len, vocab_size),
        model_fingerprint(resolved.model_path, cluster.model.max_model_len, cluster.model.quantization),
        {
            "prefill": [
                each.name for each in cluster.prefill.nodes if cluster.starts_as(each.name, "prefill")
            ],
            "decode": [each.name for each in cluster.decode.nodes if cluster.starts_as(each.name, "decode")],
        },
        node_timeout=health.node_timeout,
        loop_timeout=health.loop_timeout,
        return_window=health.return_window,
        slow_start=health.slow_start,
    )


def _dispatching(cluster: Cluster) -> Dispatching:
    router, decode = cluster.router, cluster.decode
    limits = DispatchLimits(
        max_attempts=router.max_attempts,
        max_requests=router.max_requests,
        request_timeout=router.request_timeout,
        placement_wait=router.placement_wait,
        retry_ratio=router.retry_ratio,
        queue_wait=router.queue_wait,
        max_crashes=router.max_crashes,
        reserved_tokens=decode.reserved_tokens,
        first_token_hold=router.first_token_hold_ms / 1000,
        requests_per_node=decode.max_running + decode.max_transferring,
    )
    placement, rng = router.placement, Random()
    sections: dict[Role, PrefillSection | DecodeSection] = {
        "prefill": cluster.prefill,
        "decode": cluster.decode,
    }
    uncached = [role for role, section in sections.items() if section.prefix_cache is False]
    rules = PlacementRules(
        block_tokens=placement.block_tokens,
        index_bytes=placement.index_mib << 20,
        prefix_ttl=placement.prefix_ttl,
        max_imbalance_ms=placement.max_imbalance_ms,
        session_ttl=placement.session_ttl,
        session_ms=placement.session_ms,
        busy_first_token_ms=placement.busy_first_token_ms,
        busy_pool_share=placement.busy_pool_share,
        local_tokens=router.local_prefill,
        uncached=frozenset(uncached),
    )
    return Dispatching(
        {
            "prefill": make_policy(placement.prefill, softened(prefill_cost, placement.temperature_ms, rng)),
            "decode": make_policy(placement.decode, softened(decode_cost, placement.temperature_ms, rng)),
        },
        limits,
        cluster.health.drain_timeout,
        rng,
        rules,
    )


def _images(spawner: Spawner, section: RouterSection, vision: VisionConfig | None) -> tuple[ImageLoader, int]:
    """Return the image loader and the largest accepted body, in bytes."""
    if vision is None:
        return RefusingImageLoader(), section.max_body_bytes
    own = section.images
    limits = ImageLimits(own.max_count, own.max_bytes, own.max_request_bytes, own.max_held_mib << 20)
    inspector = ImageInspector(spawner, own.max_pixels)
    fetcher = FetchProcess(spawner, own.fetch_hosts, own.max_bytes, own.fetch_timeout)
    in_base64 = own.max_request_bytes * 4 // 3
    return VerifyingImageLoader(limits, vision, inspector, fetcher), section.max_body_bytes + in_base64
