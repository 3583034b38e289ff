"""The stages of the pipeline, in its order: picklable callables with plain data."""

from stages.base import Stage
from stages.certify import CertifyStage
from stages.convert import ConvertStage
from stages.deploy import DeployStage
from stages.evaluate import EvaluateStage
from stages.export import ExportStage

STAGES: dict[str, type[Stage]] = {
    each.name: each
    for each in (ConvertStage, CertifyStage, ExportStage, DeployStage, EvaluateStage)
}
