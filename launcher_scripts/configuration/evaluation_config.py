"""The stages `evaluate` and `certify`, built from the configuration."""

from dataclasses import dataclass, replace
from pathlib import Path

from export_scripts.conversion.hub import cached_model
from export_scripts.triton.parameters import DEFAULT_MAX_SEQ_LEN
from export_scripts.triton.repository import ENSEMBLE
from foundations.files.json_content import Fields
from inference.evaluation.options import OPENAI, EvaluationOptions
from inference.evaluation.record import RunFacts
from launcher_scripts.configuration.export_config import conversion_request, has_ensemble
from launcher_scripts.configuration.schema import Config
from launcher_scripts.configuration.server_config import server_config, stated_max_seq_len
from stages.base import JobSettings
from stages.certify import CertifyStage
from stages.convert import find_checkpoint
from stages.deploy_config import FASTERTRANSFORMER, DeployConfig
from stages.deploy_config import OPENAI as OPENAI_ENGINE
from stages.endpoint import ENDPOINT_NAME
from stages.evaluate import EvaluateStage


@dataclass(frozen=True)
class Context:
    """Facts about a run that the configuration does not hold.

    Attributes:
        stages: the requested stages, and those whose outputs they read.
        command: the command line.
    """

    stages: frozenset[str] = frozenset()
    command: str = ""
    git_revision: str = ""


def evaluation_stage(config: Config, job: JobSettings, context: Context) -> EvaluateStage:
    """Return the stage `evaluate`.

    Raises:
        ValueError: The evaluation cannot start its server, which needs several nodes.
    """
    evaluate = config.evaluate
    server = server_config(config)
    follows = "deploy" in context.stages and evaluate.server is None
    if server.nodes > 1 and evaluate.server is None and not follows:
        raise ValueError(
            f"a model over {server.nodes} nodes needs a separate server job; add deploy to "
            "stages, or name a running server in evaluate.server."
        )
    is_shared = evaluate.shared_server is not None
    endpoint_path = (evaluate.shared_server or config.results_dir / "deploy") / ENDPOINT_NAME
    return EvaluateStage(
        job,
        options=_evaluation_options(config, server),
        deploy=server,
        endpoint_path=endpoint_path if follows or is_shared else None,
        stops_server=follows and not is_shared and not config.deploy.keep,
        facts=known_facts(config, server, context),
    )


def certify_stage(config: Config, job: JobSettings, _: object) -> CertifyStage:
    """Return the stage `certify`, by default for the folder that `convert` writes.

    Raises:
        ValueError: The stage cannot start its server, which needs several nodes.
    """
    options, request = config.certify, conversion_request(config, exports=False)
    server = server_config(config) if options.serve else None
    if server is not None and server.nodes > 1:
        raise ValueError(
            f"a model over {server.nodes} nodes needs a separate server job: run stages=[deploy], "
            "and give its address as certify.endpoint instead of certify.serve=true."
        )
    if options.serve:
        deploy = config.deploy
        options = replace(options, ca=deploy.tls_cert, token_file=deploy.token_file)
    own = cached_model(Path(options.source)) if options.source else request.checkpoint_path
    return CertifyStage(
        job,
        options=options,
        source=own,
        folder=Path(options.folder) if options.folder else request.folder,
        from_convert=options.folder is None,
        given=request.given,
        deploy=server,
    )


def known_facts(config: Config, server: DeployConfig, context: Context) -> RunFacts:
    """Return the known facts about the evaluated server; of one in evaluate.server, its address."""
    model, triton = config.export.model, config.export.triton_deployment
    facts: Fields = {}
    if (is_ours := config.evaluate.server is None) and server.engine != OPENAI_ENGINE:
        facts = {"tp_size": server.tp_size, "pp_size": server.pp_size}
        if not server.serves_existing:
            form, kind = config.convert.fp8, model.weight_data_type
            facts["checkpoint"] = str(model.checkpoint_path)
            facts["weight_data_type"] = kind if form is None else f"fp8 by {form}, {kind}"
            if {"dtype", "quantization"}.isdisjoint(key.replace("-", "_") for key in server.vllm):
                facts["data_type"] = triton.data_type
            if not server.is_other_engine:
                facts["int8_mode"] = int(triton.int8_mode)
                facts["max_batch_size"] = triton.max_batch_size
    return RunFacts(
        name=config.export.run.model_train_name,
        server=config.evaluate.server or "",
        engine=server.engine if is_ours else "",
        cluster=config.cluster_type,
        command=context.command,
        git_revision=context.git_revision,
        **facts,
    )


def _evaluation_options(config: Config, server: DeployConfig) -> EvaluationOptions:
    section = config.evaluate
    source = find_checkpoint(cached_model(config.export.model.checkpoint_path))
    # URL at which the server will speak OpenAI's protocol, if known.
    expected = section.server if section.protocol == OPENAI else None
    if section.server is None and server.openai.enabled:
        expected = f"http://{server.host}:{server.openai.port}/v1"
    if server.is_other_engine and section.server is None:
        known: Fields = {
            "protocol": OPENAI,
            "model": section.model or server.model_name,
            "ensemble_name": None,
            "tokenizer_dir": section.tokenizer or server.folder,
            "served_dirs": tuple(filter(None, (server.folder, server.adapter))),
            "source_path": server.folder if server.serves_existing else source,
        }
    else:
        # The conversion puts the tokenizer's files next to the shards.
        weights_dir = None if section.server else server.weights_dir
        is_known = not (section.server or server.serves_existing)
        # NVIDIA's backend does not limit the length.
        is_bounded = config.deploy.engine != FASTERTRANSFORMER
        most = stated_max_seq_len(config) or DEFAULT_MAX_SEQ_LEN
        known = {
            "ensemble_name": ENSEMBLE if has_ensemble(config) else None,
            "tokenizer_dir": section.tokenizer or weights_dir,
            "weights_dir": weights_dir,
            "source_path": source,
            "max_seq_len": most if is_bounded else None,
            "max_batch_size": config.export.triton_deployment.max_batch_size if is_known else None,
        }
    return EvaluationOptions(
        **vars(section) | known,
        data_dir=config.data_dir,
        openai_url=section.harness.url or expected,
        model_name=server.model_name,
        given=tuple((name, str(value)) for name, value in config.convert.given.items()),
    )
