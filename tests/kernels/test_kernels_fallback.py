"""What the kernels do not support, each reason by name, and that the plain form then runs."""

import dataclasses
import re
import subprocess
import sys
import types

import kernel_device
import pytest
import tiny_run
import torch
from tiny_evaluation import Engines
from torch import nn
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources

import afterdrop as ad
from afterdrop import kernels, train
from afterdrop.errors import DataError
from afterdrop.evaluation.chunks import Memory
from afterdrop.evaluation.engines import kernel_sums, text_fused
from afterdrop.evaluation.engines.dispatch import (
    evaluation_engines,
    fused_text_reason,
    operations_for,
)
from afterdrop.evaluation.engines.generic import GenericEngine, Operations
from afterdrop.evaluation.likelihoods.categorical import Categorical
from afterdrop.evaluation.loop import Execution, run_evaluation
from afterdrop.evaluation.request import Protocol, Request, StreamSettings
from afterdrop.evaluation.text_evaluation import run_text
from afterdrop.masks.uniforms import Plan
from afterdrop.models import LanguageModel, LanguageModelConfig
from afterdrop.models.fused import DeterministicPass, why_not_fused
from afterdrop.models.kernel_support import why_unsupported
from afterdrop.ranks import Ranks
from afterdrop.train.fused_text import FusedText
from afterdrop.train.fused_text import why_not as why_not_trained
from afterdrop.train.progress import Progress
from afterdrop.train.trainer import Trainer

pytestmark = kernel_device.quiet
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def able(monkeypatch):
    """As if kernels ran on every device, so that the other reasons can be seen on a CPU."""
    monkeypatch.setattr(kernels, "why_not", lambda device: None)


@pytest.fixture
def folder(tmp_path):
    return tiny_run.write_text(tmp_path / "text")


def test_devices_without_kernels(monkeypatch):
    assert kernels.why_not(CPU) == "cpu is not a CUDA device" and not kernels.ready(CPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Turing")
    assert kernels.why_not(CUDA) == "Turing is older than the Ampere generation"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert kernels.ready(CUDA)
    monkeypatch.setattr(kernels, "_installed", lambda: False)
    assert kernels.why_not(CUDA) == "Triton is not installed"


@pytest.mark.parametrize("found", [None, types.ModuleType("triton")], ids=["missing", "a stub"])
def test_triton_must_be_installed_completely(found, monkeypatch):
    assert kernels._installed()
    monkeypatch.setitem(sys.modules, "triton", found)
    assert not kernels._installed.__wrapped__()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"layer_norm": True}, "layer_norm is True"),
        ({"hidden_sizes": (4, 6), "stacking": "plain"}, "hidden_sizes is (4, 6)"),
        ({"input_gate": "tied"}, "input_gate is 'tied'"),
        ({"stacking": "residual"}, "stacking is 'residual'"),
        ({"update_dropout": 0.1}, "update_dropout is 0.1"),
        ({"mogrifier_rounds": 2}, "mogrifier_rank is 0"),
        ({"mogrifier_rounds": 2, "mogrifier_rank": 256}, "mogrifier_rank is 256"),
        ({"mogrifier_rounds": 2, "mogrifier_rank": 84}, None),
        ({"embedding_dropout": 0.2}, None),
        (
            {"embedding_dropout": 0.2, "embedding_rows": "input_and_softmax"},
            "embedding_rows is 'input_and_softmax'",
        ),
        ({"embedding_rows": "input_and_softmax"}, None),
        ({"stacking": "residual", "hidden_sizes": (4,)}, None),  # with one layer the same as skip
        ({"tied": False, "embedding_size": 3, "input_gate": "plain"}, None),
        ({"softmax_components": 3, "embedding_size": 3}, None),
        ({"softmax_components": 3, "layer_norm": True}, "layer_norm is True"),
    ],
    ids=str,
)
def test_models_that_kernels_do_not_support(options, reason):
    config = LanguageModelConfig(**{"vocabulary": 9, "hidden_sizes": (4, 4)} | options)
    assert why_not_fused(config) == reason


def test_runs_that_kernels_do_not_support(folder, able):
    def why_not(config, **other):
        run = tiny_run.trainer(config, CPU)
        parts = {"task": run.task, "model": run.model} | other
        return why_not_trained(config, device=CPU, **parts)

    assert why_not(tiny_run.config(folder)) is None
    classifier = "only language models have kernels"
    assert why_not(tiny_run.config(folder), task=object()) == classifier
    assert why_not(tiny_run.config(folder), model=nn.Linear(2, 2)) == classifier
    assert why_not(tiny_run.config(folder, objective={"samples": 2})) is None
    assert why_not(tiny_run.config(folder, objective={"alpha": 0.5})) is None
    several = tiny_run.config(folder, objective={"samples": 2, "alpha": 0.5})
    assert why_not(several) == "objective.alpha is 0.5 with 2 samples"
    mixture = {"softmax_components": 2}
    assert why_not(tiny_run.config(folder, mixture, objective={"samples": 2})) is None
    several = tiny_run.config(folder, mixture, objective={"samples": 2, "alpha": 0.5})
    assert why_not(several) == "objective.alpha is 0.5 with 2 samples"
    assert why_not(tiny_run.config(folder, mixture, objective={"activation_penalty": 2.0})) is None
    model = tiny_run.trainer(tiny_run.config(folder, mixture), CPU).model
    for name in ("fraternal_penalty", "expectation_linear_penalty"):
        compared = tiny_run.config(folder, objective={name: 0.5})  # a configuration refuses both
        reason = f"objective.{name} is 0.5 with softmax_components 2"
        assert why_not(compared, model=model) == reason
    other = tiny_run.config(folder, optimiser={"name": "adam"})
    assert why_not(other) == "optimiser.name is 'adam'"
    assert why_not(tiny_run.config(folder, {"layer_norm": True})) == "layer_norm is True"


@pytest.mark.parametrize(
    ("window", "validation", "too_many"),
    [(2**23, 3, True), (2**23 - 1, 3, False), (3, 2**26 - 1, True), (3, 2**26 - 2, False)],
)
def test_windows_with_more_elements_than_32_bits_can_count(
    window, validation, too_many, folder, able
):
    """One layer of 5 units, padded to 32; two rows of four gates in training, one in validation."""
    sections = {"objective": {"batch_size": 2}, "validation": {"stripes": 1, "window": validation}}
    run = tiny_run.trainer(tiny_run.config(folder, **sections), CPU)
    run.task.window = window  # a text that long would not fit a test
    reason = f"a window has {2**31:,} gates or units, and the kernels count in 32 bits"
    assert run._why_not_fused() == (reason if too_many else None)


@pytest.mark.parametrize(("window", "too_many"), [(2**22, True), (2**22 - 1, False)])
def test_mixtures_with_more_latent_units_than_32_bits_can_count(window, too_many, folder, able):
    """Two rows of 8 components of 5 units, padded to 32; four gates of 32 units are fewer."""
    config = tiny_run.config(folder, {"softmax_components": 8}, objective={"batch_size": 2})
    run = tiny_run.trainer(config, CPU)
    run.task.window = window
    reason = f"a window has {2**31:,} gates or units, and the kernels count in 32 bits"
    assert run._why_not_fused() == (reason if too_many else None)


def test_the_device_is_the_first_reason_of_a_run(folder):
    run = tiny_run.trainer(tiny_run.config(folder), CPU)
    reason = why_not_trained(run.config, run.task, run.model, CPU)
    assert reason == "cpu is not a CUDA device"


class OtherRankFails(Ranks):
    """Two ranks, of which the other one reports a failure."""

    def max(self, number):
        return 1


def test_a_run_whose_kernels_fail_on_another_rank_goes_on_without_them(folder, able):
    run = tiny_run.trainer(tiny_run.config(folder, objective={"batch_size": 4}), CPU)
    assert run._why_not_fused() is None
    shared = Trainer(run.config, run.task, run.model, OtherRankFails(0, 2))
    assert shared._why_not_fused() is None and shared._kernels() is None
    assert shared.plain == "a kernel cannot run on another rank"
    assert shared._kernels() is None  # and it is not tried again


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"model": {"layer_norm": True}}, "layer_norm is True"),
        (
            {"model": {"softmax_components": 3}},
            "softmax_components is 3, and only training has kernels for mixtures",
        ),
        ({"plan": Plan(4, scheme="iid")}, "masks are 'iid'"),
        ({"plan": Plan(8, blocks=4)}, "samples are in 4 blocks"),
        ({"plan": Plan(1), "grid": ad.Grid((1,), (0, 1))}, "there is one sample"),
        ({"stream": StreamSettings(carry="sampled")}, "stream.carry is 'sampled'"),
        ({"grid": ad.Grid((0, 1), (0, 1), temper="sample")}, "grid.temper is 'sample'"),
        (
            {"grid": ad.Grid((0, 0.1), (0, 1))},
            "alphas (0.0, 0.1) are not all among (0.0, 0.25, 0.5, 0.75, 1.0)",
        ),
        ({"dtype": torch.float64}, "weights are torch.float64"),
        ({"temperatures": (0.5, 20.0)}, None),
        ({"temperatures": (0.1, 20.0)}, "temperatures=(0.1, 20.0) are too far apart"),
    ],
    ids=str,
)
def test_evaluations_that_kernels_do_not_support(change, reason, able):
    options = {"stream": StreamSettings(), **change}
    config = LanguageModelConfig(9, (4,), **options.pop("model", {}))
    model = LanguageModel(config).to(options.pop("dtype", torch.float32))
    request = Request(**{"grid": ad.Grid((0, 0.5, 1), (0, 1)), "plan": Plan(4)} | options)
    assert text_fused.supports(request, model, CPU) == reason


def test_only_language_models_have_kernels_of_their_own(able):
    request = Request(ad.Grid((0, 1), (0, 1)), Plan(4))
    reason = text_fused.supports(request, nn.Linear(2, 2), CPU)
    assert reason == "Linear is not a LanguageModel"


@pytest.mark.parametrize(
    ("temperatures", "reason"),
    [
        (None, None),  # a default bracket spans a factor of 64
        ((0.125, 8.0), None),
        ((0.125, 20.0), "temperatures=(0.125, 20.0) are too far apart"),
    ],
)
def test_temperatures_that_kernels_do_not_support(temperatures, reason, able):
    request = Request(ad.Grid((0, 1), (0, 1)), Plan(4), temperatures=temperatures)
    assert kernel_sums.supports(request, nn.Linear(2, 2), CPU) == reason
    sums = [operations.sums for operations in operations_for(request, nn.Linear(2, 2), CPU)]
    assert (kernel_sums.KernelSums in sums) == (reason is None)


def extended(options):
    """The same options with one more field."""
    name = f"Later{type(options).__name__}"
    later = dataclasses.make_dataclass(
        name, [("new", bool, False)], bases=(type(options),), frozen=True
    )
    values = {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}
    return later(**values)


@pytest.mark.parametrize(
    ("where", "tables"),
    [
        (None, [text_fused, kernel_sums]),
        ("grid", [text_fused, kernel_sums]),
        ("plan", [text_fused, kernel_sums]),
        ("stream", [text_fused]),  # sums do not depend on how a text is read
    ],
)
def test_an_option_that_the_kernels_do_not_know_is_refused(where, tables, able):
    model = LanguageModel(LanguageModelConfig(9, (4,), output_dropout=0.5))
    request = Request(ad.Grid((0, 1), (0, 1)), Plan(4), stream=StreamSettings())
    assert fused_text_reason(request, model, CPU) is None
    if where is None:
        request = extended(request)
    else:
        part = extended(getattr(request, where))
        request = dataclasses.replace(request, **{where: part})
    reason = f"{where + '.' if where else ''}new is a setting that the kernels do not know"
    for engine in tables:
        assert why_unsupported(request, engine.SUPPORTED) == reason
        assert engine.supports(request, model, CPU) == reason
    assert fused_text_reason(request, model, CPU) == reason
    sums = [operations.sums for operations in operations_for(request, model, CPU)]
    assert (kernel_sums.KernelSums in sums) == (kernel_sums not in tables)


@pytest.mark.parametrize("engine", [text_fused, kernel_sums], ids=lambda engine: engine.__name__)
def test_every_option_of_a_request_is_listed(engine):
    assert set(engine.SUPPORTED) == {field.name for field in dataclasses.fields(Request)}


def test_a_cpu_evaluates_without_kernels_even_in_the_interpreter():
    model = LanguageModel(LanguageModelConfig(9, (4,), output_dropout=0.5))
    request = Request(ad.Grid((0, 1), (0, 1)), Plan(4), stream=StreamSettings())
    assert text_fused.supports(request, model, CPU) == "cpu is not a CUDA device"
    assert operations_for(request, model, CPU) == [Operations()]
    protocol = Protocol(request, 0.125, 8.0, 9, "", batched=True, shared=False)
    engines, reason = evaluation_engines(model, protocol, Categorical(), None, Memory.of(CPU))
    assert isinstance(engines.engine, GenericEngine) and reason is None


def test_a_gpu_without_kernels_gives_the_reason_for_texts(monkeypatch):
    monkeypatch.setattr(kernels, "why_not", lambda device: "Turing is older")
    on_gpu = types.SimpleNamespace(parameters=lambda: iter([types.SimpleNamespace(device=CUDA)]))
    for stream, reason in ((StreamSettings(), "Turing is older"), (None, None)):
        request = Request(ad.Grid((0, 1), (0, 1)), Plan(4), stream=stream)
        protocol = Protocol(request, 0.125, 8.0, 9, "", batched=True, shared=False)
        engines, found = evaluation_engines(on_gpu, protocol, Categorical(), None, Memory.of(CPU))
        assert isinstance(engines.engine, GenericEngine) and found == reason


@pytest.mark.parametrize("shown", [True, False])
def test_the_reason_appears_only_with_the_progress_bar(shown, capsys):
    def choose(*args):
        return Engines()(*args)[0], "Turing is older"

    net = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 3))
    data = [(torch.randn(6, 4), torch.randint(3, (6,)))]
    request = Request(ad.Grid((0, 1), (0, 1)), Plan(4))
    run_evaluation(net, data, request, Execution(progress=shown), choose_engines=choose)
    note = "Evaluating without kernels, which is slower: Turing is older.\n"
    assert capsys.readouterr().out == (note if shown else "")


def test_a_cpu_trains_without_kernels_even_in_the_interpreter(
    folder, tmp_path, monkeypatch, capsys
):
    """And without a note, since kernels are not expected there."""
    used = []
    monkeypatch.setattr(Trainer, "_plain_step", counted(Trainer._plain_step, used))
    config = tiny_run.config(folder)
    train.run(config, tmp_path / "run", device="cpu", progress=True)
    assert len(used) == 10
    assert "kernels" not in capsys.readouterr().out
    assert tiny_run.trainer(config, CPU).plain is None


def counted(method, used):
    def call(self):
        used.append(1)
        return method(self)

    return call


def test_notes_appear_only_with_the_progress_bar(capsys):
    for shown in (True, False):
        bar = Progress(10, 0, "word", shown=shown)
        bar.note("Training without kernels, which is slower: layer_norm is True.")
        bar.close("")
        printed = capsys.readouterr()
        assert ("layer_norm is True." in printed.out + printed.err) == shown


FAILURES = [
    OutOfResources(300_000, 232_448, "shared memory"),
    CompilationError("x = tl.zeros([3])", None, "3 is not a power of two"),
    RuntimeError("Triton Error [CUDA]: device kernel image is invalid"),
    RuntimeError("Failed to find C compiler. Please specify via CC environment variable."),
    subprocess.CalledProcessError(1, ["gcc"]),
]
OTHERS = [
    RuntimeError("Triton Error [CUDA]: out of memory"),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
    RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
    DataError("no targets"),
]


def failing(error):
    def call(*args, **options):
        raise error

    return call


@pytest.mark.parametrize("error", FAILURES, ids=repr)
def test_errors_that_mean_that_a_kernel_cannot_run(error):
    with pytest.warns(UserWarning, match=r"a test continues without kernels.*\("):
        reason = kernels.reason_to_fall_back(error, "a test")
    assert reason.startswith(f"a kernel cannot run here ({type(error).__name__}: ")


@pytest.mark.parametrize("error", OTHERS, ids=repr)
def test_other_errors_are_raised_again(error):
    with pytest.raises(type(error), match=re.escape(str(error))):
        kernels.reason_to_fall_back(error, "a test")


def test_a_kernel_that_fails_is_tried_once_and_warned_of_once():
    attempts, fallback = [], kernels.Fallback("a test")

    def kernel():
        attempts.append("kernel")
        raise FAILURES[0]

    with pytest.warns(UserWarning, match="a test continues without kernels") as caught:
        found = [fallback.run(kernel, lambda: "plain") for _ in range(3)]
    assert found == ["plain"] * 3 and attempts == ["kernel"] and len(caught) == 1
    assert "OutOfResources" in fallback.reason


def test_a_kernel_that_works_is_used_and_its_own_errors_are_raised():
    fallback = kernels.Fallback("a test")
    with pytest.raises(torch.OutOfMemoryError):
        fallback.run(failing(OTHERS[1]), lambda: "plain")
    assert fallback.run(lambda: "kernel", failing(OTHERS[2])) == "kernel"
    assert fallback.reason is None


def half_a_step(self, number):
    with torch.no_grad():
        self.model.embedding.add_(1.0)
    self.optimiser.param_groups[0]["step"] += 1
    raise FAILURES[0]


@pytest.mark.parametrize(
    ("where", "how"),
    [
        ("step", failing(FAILURES[0])),
        ("step", half_a_step),
        ("validation_batches", failing(FAILURES[1])),
    ],
    ids=["step", "half a step", "validation"],
)
def test_a_run_whose_kernels_fail_equals_the_plain_run(folder, tmp_path, where, how, monkeypatch):
    """Also if they fail after weights have changed."""
    config = tiny_run.config(folder)
    wanted = train.run(config, tmp_path / "plain", device="cpu", progress=False).best
    monkeypatch.setattr(kernels, "why_not", lambda device: None)
    monkeypatch.setattr(kernels._partitions, "reason", "not under test")
    monkeypatch.setattr(FusedText, "validation_batches", plain_validation)
    monkeypatch.setattr(FusedText, where, how)
    with pytest.warns(UserWarning, match="training continues without kernels"):
        found = train.run(config, tmp_path / "run", device="cpu", progress=False).best
    assert found == wanted


def plain_validation(self):
    return self.task.validation_batches(self.model)


def test_a_run_out_of_memory_raises(folder, tmp_path, able, monkeypatch):
    monkeypatch.setattr(kernels._partitions, "reason", "not under test")
    monkeypatch.setattr(FusedText, "step", failing(OTHERS[1]))
    monkeypatch.setattr(FusedText, "validation_batches", plain_validation)
    with pytest.raises(torch.OutOfMemoryError):
        train.run(tiny_run.config(folder), tmp_path / "run", device="cpu", progress=False)


def test_an_evaluation_whose_kernels_fail_equals_the_plain_one(monkeypatch):
    torch.manual_seed(0)
    model = LanguageModel(LanguageModelConfig(9, (4,), input_dropout=0.3, output_dropout=0.5))
    request = Request(
        ad.Grid((0, 1), (0, 1)), Plan(4), temperatures=(0.25, 4), stream=StreamSettings(window=5)
    )
    text, execution = torch.randint(1, 9, (40,)), Execution(windows=2)
    wanted = run_text(model, text, 0, request, execution, lines=False)
    monkeypatch.setattr(kernels, "why_not", lambda device: None)
    monkeypatch.setattr(DeterministicPass, "run", failing(FAILURES[0]))
    monkeypatch.setattr(text_fused.TextFusedEngine, "_windows", failing(FAILURES[1]))
    monkeypatch.setattr("afterdrop.kernels.log_partitions.log_partitions", failing(FAILURES[2]))
    monkeypatch.setattr(kernels._partitions, "reason", None)
    with pytest.warns(UserWarning, match="continues without kernels") as caught:
        found = run_text(model, text, 0, request, execution, lines=False)
    assert len(caught) == 3  # each once, although there are four batches
    for name, tensor in wanted.tensors.items():
        assert torch.equal(found.tensors[name], tensor), name


def test_any_model_is_evaluated_without_kernels_that_fail():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))
    data = [(torch.randn(6, 4), torch.randint(3, (6,))) for _ in range(3)]
    request = Request(ad.Grid((0, 1), (0, 1)), Plan(4))
    wanted = run_evaluation(net, data, request, Execution())
    broken = Operations(draw=failing(FAILURES[3]), kernels=True)
    engines = Engines(broken, broken, Operations())
    with pytest.warns(UserWarning, match="C compiler") as caught:
        found = run_evaluation(net, data, request, Execution(), choose_engines=engines)
    assert len(caught) == 1
    assert [engine.batches for engine in engines.made] == [[0], [0, 1, 2]]
    for name, tensor in wanted.tensors.items():
        assert torch.equal(found.tensors[name], tensor), name
