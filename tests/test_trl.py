"""TRL's trainers, run for real on a tiny model with their own loss and with the fused one."""

import copy
import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
pytest.importorskip("trl", minversion="1.16")

import tiny  # noqa: E402
import transformers  # noqa: E402
from datasets import Dataset  # noqa: E402
from ops.memory import LargestTensor  # noqa: E402
from peft import LoraConfig, get_peft_model  # noqa: E402
from trl.experimental.gkd import GKDConfig, GKDTrainer  # noqa: E402
from trl.experimental.sdft import SDFTConfig, SDFTTrainer  # noqa: E402
from trl.experimental.sdpo import SDPOConfig, SDPOTrainer  # noqa: E402
from trl.experimental.utils import DataCollatorForChatML  # noqa: E402
from trl.trainer.distillation_config import DistillationConfig  # noqa: E402
from trl.trainer.distillation_trainer import DistillationTrainer  # noqa: E402
from trl.trainer.sft_trainer import SFTTrainer  # noqa: E402

from lopd_fast import fused_linear  # noqa: E402
from lopd_fast.fused_head import Projection  # noqa: E402
from lopd_fast.integrations.trl import full_vocabulary, use_fused_loss  # noqa: E402
from lopd_fast.integrations.trl.full_vocabulary import full_divergence, label_logprobs  # noqa: E402
from lopd_fast.integrations.trl.heads import HeadInput, check_head, head_input  # noqa: E402
from lopd_fast.integrations.trl.methods import divergence_of  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

STEPS, ROWS = 5, 4  # optimizer steps, sequences in each
SAMPLING = {"max_completion_length": 5, "generation_kwargs": {"sequence_bias": [[[tiny.END], 4.0]]}}
LORA = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")


def first_row_masked(batch: dict[str, Any]) -> dict[str, Any]:
    batch["completion_mask"][0] = 0
    return batch


class Distillation(DistillationTrainer):
    def _generate_and_score_completions(self, inputs: Any) -> Any:
        return first_row_masked(super()._generate_and_score_completions(inputs))


class SDFT(SDFTTrainer):
    def sample_rollouts(self, inputs: Any) -> Any:
        return first_row_masked(super().sample_rollouts(inputs))  # pyright: ignore[reportArgumentType]


class HideMarked(DataCollatorForChatML):
    """Leaves nothing to learn of the marked examples."""

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Tensor]:
        batch = super().__call__(examples)
        batch["labels"][torch.tensor([example["hidden"] for example in examples])] = -100
        return batch


def settings(config: Any, folder: Any, accumulation: int, **options: Any) -> Any:
    options = {"bf16": False} | options
    return config(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=ROWS // accumulation,
        gradient_accumulation_steps=accumulation,
        optim="sgd",  # Adam divides gradients by their size, and so makes large what rounding leaves of those near 0
        learning_rate=2e-2,
        logging_steps=1,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        **options,
    )


def prompts(**fields: Any) -> Dataset:
    return Dataset.from_list(
        [{"prompt": [{"role": "user", "content": "Say" + " so" * i}], **fields} for i in range(ROWS * STEPS)]
    )


def distillation(folder: Any, accumulation: int, peft: bool, student: Any = None, **options: Any) -> Any:
    return Distillation(
        model=student or tiny.model(),
        teacher_model=tiny.model("qwen3"),
        args=settings(DistillationConfig, folder, accumulation, **SAMPLING, **options),
        train_dataset=prompts(),
        processing_class=tiny.tokenizer(),
        peft_config=copy.deepcopy(LORA) if peft else None,
    )


def sdpo(folder: Any, accumulation: int, peft: bool, student: Any = None, **options: Any) -> Any:
    """The first of two attempts succeeds: it is the other's demonstration and has none, so nothing to learn."""
    options = {"distillation_mode": "topk_logits", "distillation_topk": 7, "num_generations": 2} | options
    options.setdefault("teacher_model_kind", "base" if peft else "live")
    return SDPOTrainer(
        model=student or tiny.model(),
        reward_funcs=[lambda completions, **_: [float(i % 2 == 0) for i in range(len(completions))]],
        args=settings(SDPOConfig, folder, accumulation, **SAMPLING, **options),
        train_dataset=prompts(),
        processing_class=tiny.tokenizer(),
        peft_config=copy.deepcopy(LORA) if peft else None,
    )


def sdft(folder: Any, accumulation: int, peft: bool, student: Any = None, **options: Any) -> Any:
    options = {"distillation_topk": 7, "num_generations": 1} | options
    options.setdefault("teacher_model_kind", "base" if peft else "live")
    return SDFT(
        model=student or tiny.model(tie=False),
        args=settings(SDFTConfig, folder, accumulation, **SAMPLING, **options),
        train_dataset=prompts(privileged_context="The answer is ab."),
        processing_class=tiny.tokenizer(),
        peft_config=copy.deepcopy(LORA) if peft else None,
    )


def gkd(folder: Any, accumulation: int, peft: bool, student: Any = None, **options: Any) -> Any:
    examples = [
        {
            "messages": [
                {"role": "user", "content": "Say ab."},
                {"role": "assistant", "content": "ab" * (1 + i % 5)},
            ],
            "hidden": i % ROWS == 2,
        }
        for i in range(ROWS * STEPS)
    ]
    options = {"lmbda": 0.0, "max_length": 64} | options
    return GKDTrainer(
        model=student or tiny.model(),
        teacher_model=tiny.model("qwen3"),
        args=settings(GKDConfig, folder, accumulation, max_new_tokens=5, **options),
        data_collator=HideMarked(tokenizer=tiny.tokenizer(), max_length=64),
        train_dataset=Dataset.from_list(examples),
        processing_class=tiny.tokenizer(),
        peft_config=copy.deepcopy(LORA) if peft else None,
    )


Make = Callable[..., Any]
UNLIKE = ("time", "second", "runtime", "topk_mass")  # what a log may differ in, or have more of


def trained(make: Make, folder: Any, *, fused: bool, **options: Any) -> Any:
    transformers.set_seed(0)
    trainer = make(folder, **options)
    if fused:
        use_fused_loss(trainer)
    trainer.train()
    return trainer


def assert_same_training(make: Make, folder: Any, **options: Any) -> None:
    """Every number that is logged, and every parameter, after five steps."""
    usual, fused = (trained(make, folder, fused=on, **options) for on in (False, True))
    expected = {name: p.detach() for name, p in usual.model.named_parameters()}
    start = dict(make(folder, **options).model.named_parameters())
    learned = [name for name in start if (expected[name] - start[name]).abs().max() > 1e-4]
    assert learned, "nothing was learned"
    for name, p in fused.model.named_parameters():
        torch.testing.assert_close(
            p.detach(), expected[name], atol=1e-5, rtol=0, msg=lambda m, n=name: f"{n}: {m}"
        )
    assert len(usual.state.log_history) == STEPS + 1
    for before, after in zip(usual.state.log_history, fused.state.log_history, strict=True):
        for name, value in before.items():
            if not any(part in name for part in UNLIKE):
                assert after[name] == pytest.approx(value, abs=1e-5, rel=1e-5), name
    losses = [row["loss"] for row in usual.state.log_history[:-1]]
    assert min(losses) > 1e-3 and len(set(losses)) == STEPS


QUICK = [
    pytest.param(distillation, {"accumulation": 4, "peft": False, "beta": 0.5}, id="distillation"),
    pytest.param(sdpo, {"accumulation": 4, "peft": False, "distillation_add_tail": True}, id="sdpo"),
    pytest.param(sdft, {"accumulation": 1, "peft": True}, id="sdft"),
    pytest.param(gkd, {"accumulation": 4, "peft": True}, id="gkd"),
]


@pytest.mark.parametrize("make, options", QUICK)
def test_five_steps(make: Make, options: dict[str, Any], tmp_path: Any):
    assert_same_training(make, tmp_path, **options)


def one_batch(trainer: Any) -> Any:
    """The first micro-batch, generated by the student where the trainer does that."""
    batch = next(iter(trainer.get_train_dataloader()))
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    return trainer._prepare_inputs(batch)


def loss_and_gradients(trainer: Any, batch: Any, **kwargs: Any) -> dict[str, Tensor]:
    trainer.model.zero_grad()
    loss = trainer.compute_loss(trainer.model, batch, **kwargs)
    loss.backward()
    gradients = {name: p.grad for name, p in trainer.model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **gradients}


def assert_same_step(trainer: Any, batch: Any, **kwargs: Any) -> None:
    usual = loss_and_gradients(trainer, batch, **kwargs)
    with use_fused_loss(trainer):
        fused = loss_and_gradients(trainer, batch, **kwargs)
    assert fused.keys() == usual.keys()
    assert usual["loss"] > 1e-4
    for name, expected in usual.items():
        torch.testing.assert_close(
            fused[name], expected, atol=2e-6, rtol=2e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("make", [sdft, sdpo])
def test_every_mode_of_self_distillation(make: Make, tmp_path: Any):
    """Two passes over the same rollouts, so that the second is weighted by importance ratios."""
    trainer = make(tmp_path, 1, False, num_iterations=2, distillation_is_clip=1.5)
    batch = one_batch(trainer)
    with use_fused_loss(trainer):
        fields = [batch[f"{side}_{what}"] for side in ("prompt", "completion") for what in ("ids", "mask")]
        logps = trainer._compute_rollout_logps(*fields)
    # But for the first row of SDFT's, which is masked once TRL has these.
    torch.testing.assert_close(logps[1:], batch["old_per_token_logps"][1:], atol=1e-5, rtol=1e-5)
    batch["old_per_token_logps"] = logps - torch.randn(logps.shape)
    for trainer.args.distillation_alpha in (0.0, 0.3, 1.0):
        for trainer.args.distillation_mode in ("topk_logits", "full_logits"):
            for trainer.args.distillation_add_tail in (False, True):
                assert_same_step(trainer, batch)


def scaled(kind: str) -> Any:
    """A model that does more to its logits than its head does."""
    sizes: dict[str, Any] = dict(
        vocab_size=tiny.VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=tiny.END,
        pad_token_id=tiny.END,
    )
    more = {
        "Gemma2": {"final_logit_softcapping": 3.0},
        "Cohere": {"logit_scale": 0.2},
        "Granite": {"logits_scaling": 4.0},
    }
    config = getattr(transformers, f"{kind}Config")(**sizes, **more[kind])
    torch.manual_seed(3)
    return getattr(transformers, f"{kind}ForCausalLM")(config)


@pytest.mark.parametrize("kind", ["Gemma2", "Cohere", "Granite"])
def test_scaled_and_capped_logits(kind: str, tmp_path: Any):
    """The teacher has neither: each side is read from its own config."""
    trainer = gkd(tmp_path, 1, False, student=scaled(kind))
    assert_same_step(trainer, one_batch(trainer), num_items_in_batch=torch.tensor(17))


def test_scaled_logits_of_both_sides(tmp_path: Any):
    trainer = sdft(tmp_path, 1, False, student=scaled("Gemma2"), distillation_alpha=1.0, temperature=0.7)
    assert_same_step(trainer, one_batch(trainer))


def test_head_trained_through_modules_to_save(tmp_path: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(LORA, "modules_to_save", ["lm_head"])
    trainer = sdft(tmp_path, 1, True, distillation_add_tail=True)
    batch = one_batch(trainer)
    with torch.no_grad():  # away from the teacher's, which is the original
        trainer.model.get_output_embeddings().weight.add_(0.1)
    assert_same_step(trainer, batch)
    trained = [
        name for name, p in trainer.model.named_parameters() if "lm_head" in name and p.grad is not None
    ]
    assert len(trained) == 1, trained


def test_liger_model(tmp_path: Any):
    """Liger's forward, as use_liger_kernel installs it, calls the head where there are no labels."""
    liger = pytest.importorskip("liger_kernel.transformers")
    student = tiny.model()
    kernels = dict.fromkeys(["rope", "rms_norm", "swiglu", "cross_entropy"], False)  # they need a GPU
    liger.apply_liger_kernel_to_llama(**kernels, fused_linear_cross_entropy=True, model=student)
    assert "liger" in student.forward.__func__.__module__
    trainer = gkd(tmp_path, 1, False, student=student)
    assert_same_step(trainer, one_batch(trainer))


def test_evaluation_with_metrics_gets_logits(tmp_path: Any):
    trainer = gkd(tmp_path, 1, False)
    batch = one_batch(trainer)
    with torch.no_grad(), use_fused_loss(trainer):
        loss, outputs = trainer.compute_loss(trainer.model, batch, return_outputs=True)
        torch.testing.assert_close(loss, trainer.compute_loss(trainer.model, batch))
    assert outputs.logits.shape[-1] == tiny.VOCABULARY


@pytest.mark.parametrize("make", [distillation, sdft, gkd])
def test_no_logits_exist(make: Make, tmp_path: Any, monkeypatch: pytest.MonkeyPatch):
    """With chunks of one row, no tensor but the head's gradient is as large as logits would be."""
    monkeypatch.setattr(tiny, "VOCABULARY", 4096)
    for module in (fused_linear, full_vocabulary):
        monkeypatch.setitem(module.CHUNK_BYTES, "cpu", 1)
    trainer = make(tmp_path, 1, False)
    batch = one_batch(trainer)
    mask = batch["completion_mask"] if "completion_mask" in batch else batch["labels"] != -100
    logits = int(mask.sum()) * 4096 * 4
    largest = []
    for step in (lambda _: nullcontext(), use_fused_loss):
        with step(trainer), LargestTensor(ignore=(4096, 32, torch.float32)) as watched:
            loss_and_gradients(trainer, batch)
        largest.append(watched.bytes)
    if make is not distillation:  # TRL's own holds tiles of 32,768 ids
        assert largest[0] >= logits
    assert largest[1] < logits


def test_undo_gives_back_the_trainers_own(tmp_path: Any):
    trainer = sdft(tmp_path, 1, False)
    before = dict(vars(trainer))
    handle = use_fused_loss(trainer)
    assert trainer._forward_logits.__func__ is not SDFTTrainer._forward_logits
    with pytest.raises(ValueError, match="_forward_logits is replaced already"):
        use_fused_loss(trainer)
    handle.undo()
    handle.undo()
    assert vars(trainer) == before
    head = trainer.model.get_output_embeddings()
    with pytest.raises(RuntimeError, match="in the middle"), use_fused_loss(trainer):
        head_input(trainer.model, "student", lambda: (_ for _ in ()).throw(RuntimeError("in the middle")))
    assert vars(trainer) == before and "forward" not in vars(head)


REFUSED = [
    ({"distillation_mode": "sampled_token"}, "'sampled_token' is no divergence"),
    ({"distillation_weight": 0.5}, "distillation_weight=0.5 mixes in a policy loss"),
    ({"distillation_topk": None}, "needs distillation_topk"),
    ({"torch_compile": True}, "torch_compile"),
    ({"_n_gpu": 2}, "DataParallel"),
]


def test_refuses_what_it_cannot_do_the_same(tmp_path: Any, monkeypatch: pytest.MonkeyPatch):
    trainer = sdpo(tmp_path, 1, False)
    for changes, message in REFUSED:
        with monkeypatch.context() as patch:
            for name, value in changes.items():
                patch.setattr(trainer.args, name, value)
            with pytest.raises(ValueError, match=message):
                use_fused_loss(trainer)
    for name, value, message in (
        ("use_teacher_server", True, "takes its teacher from a server"),
        ("teacher_model", None, "has no teacher_model"),
        ("is_fsdp_enabled", True, "FSDP shards"),
        (
            "__class__",
            type("Own", (SDPOTrainer,), {"_forward_logits": print}),
            "Own has a _forward_logits of its own",
        ),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(trainer, name, value)
            with pytest.raises(ValueError, match=message):
                use_fused_loss(trainer)
    with pytest.raises(TypeError, match="not object"):
        use_fused_loss(object())
    with pytest.raises(TypeError, match="not SFTTrainer"):
        use_fused_loss(SFTTrainer.__new__(SFTTrainer))


def test_refuses_heads_that_are_more_than_a_weight():
    adapted = get_peft_model(tiny.model(tie=False), LoraConfig(r=2, target_modules=["lm_head"]))
    with pytest.raises(ValueError, match="the student's output head carries a PEFT adapter"):
        check_head(adapted, "student")
    plain = tiny.model(tie=False)
    check_head(plain, "student")
    assert "forward" not in vars(plain.lm_head)
    for weight, message in (
        (torch.zeros(0, 32), "with 0 numbers"),
        (torch.zeros(288, 32, device="meta"), "on meta"),
        (torch.zeros(288, 32, dtype=torch.uint8), "of torch.uint8"),
    ):
        plain.lm_head.weight = nn.Parameter(weight, requires_grad=False)
        with pytest.raises(ValueError, match=message):
            check_head(plain, "teacher")
    plain.lm_head = nn.Sequential(nn.Identity(), nn.Identity())
    with pytest.raises(ValueError, match="is a Sequential"):
        check_head(plain, "student")
    odd = scaled("Cohere")
    odd.config.logit_scale = 0.5  # the model keeps the one that it was made with
    with pytest.raises(ValueError, match=r"scale 0\.5 and soft-cap None"):
        check_head(odd, "student")


def random_side(rows: int, width: int, projection: Projection, bias: bool) -> HeadInput:
    hidden = torch.randn(2, rows // 2, width, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(37, width, dtype=torch.float64, requires_grad=True)
    offset = torch.randn(37, dtype=torch.float64, requires_grad=True) if bias else None
    return HeadInput(hidden, weight, offset, projection)


def logits_of(side: HeadInput, temperature: float) -> Tensor:
    z = nn.functional.linear(side.hidden, side.weight, side.bias) * side.projection.logit_scale
    cap = side.projection.logit_softcap
    return (z if cap is None else cap * torch.tanh(z / cap)) / temperature


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_full_divergence_is_that_of_all_logits(beta: float, monkeypatch: pytest.MonkeyPatch):
    """Against GKD's formula in fp64, in chunks of three rows; the sides differ in width, scale, cap and bias."""
    monkeypatch.setitem(full_vocabulary.CHUNK_BYTES, "cpu", 2 * 3 * 37 * 8)
    monkeypatch.setitem(full_vocabulary.SCRATCH_BYTES, "cpu", 2 * 14 * 37 * 8)
    student = random_side(10, 5, Projection(0.7, 4.0), bias=True)
    teacher = random_side(10, 3, Projection(1.0, None), bias=False)
    weight = torch.rand(2, 5, dtype=torch.float64)
    weight[0, 1:4] = 0
    result = full_divergence(
        student, teacher, token_weight=weight, divergence=divergence_of(beta), beta=beta, temperature=1.5
    )
    z, u = logits_of(student, 1.5), logits_of(teacher, 1.5).detach()
    per_id = GKDTrainer.generalized_jsd_loss(z, u, beta=beta, reduction="none")
    expected = (weight * per_id.sum(-1)).sum()
    torch.testing.assert_close(result.loss, expected)
    torch.testing.assert_close(result.kl, per_id.sum(-1).detach() * (weight > 0))
    entropy = torch.distributions.Categorical(logits=z.detach()).entropy() * (weight > 0)
    torch.testing.assert_close(result.entropy, entropy)
    inputs = [student.hidden, student.weight, student.bias]
    for name, got, want in zip(
        ("hidden", "weight", "bias"),
        torch.autograd.grad((result.loss * 3).tanh(), inputs, retain_graph=True),
        torch.autograd.grad((expected * 3).tanh(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(got, want, msg=lambda m, n=name: f"{n}: {m}")
    assert teacher.weight.grad is None
    labels = torch.randint(37, (2, 5))
    logps = z.detach().log_softmax(-1).gather(-1, labels[..., None]).squeeze(-1)
    torch.testing.assert_close(label_logprobs(student, labels, 1.5), logps)


def test_full_divergence_of_no_rows_and_of_equal_sides():
    student = random_side(6, 5, Projection(1.0, None), bias=False)
    call: dict[str, Any] = dict(divergence="reverse_kl", beta=1.0)
    nothing = full_divergence(student, student, token_weight=torch.zeros(2, 3), **call)
    assert nothing.loss == 0
    for gradient in torch.autograd.grad(nothing.loss, [student.hidden, student.weight]):
        assert gradient.count_nonzero() == 0
    equal = full_divergence(student, student, token_weight=torch.ones(2, 3), **call)
    assert equal.loss.abs() < 1e-12
    assert torch.autograd.grad(equal.loss, student.hidden)[0].abs().max() < 1e-12
    with pytest.raises(ValueError, match=r"rows \(2, 3\)"):
        full_divergence(student, student, token_weight=torch.ones(2, 4), **call)
    other = random_side(6, 5, Projection(1.0, None), bias=False)
    other = HeadInput(other.hidden, other.weight[:30], None, other.projection)
    with pytest.raises(ValueError, match="37 ids and the teacher's 30"):
        full_divergence(student, other, token_weight=torch.ones(2, 3), **call)


@pytest.mark.slow
@pytest.mark.parametrize("make", [distillation, sdpo, sdft, gkd])
@pytest.mark.parametrize(
    "accumulation, peft, weight, tail",
    [(1, False, 0.0, True), (4, False, 0.5, False), (1, True, 1.0, False), (4, True, 0.3, True)],
)
def test_five_steps_of_every_kind(
    make: Make, accumulation: int, peft: bool, weight: float, tail: bool, tmp_path: Any
):
    if make in (distillation, gkd):
        options: dict[str, Any] = {"beta": weight}
    else:
        options = {"distillation_alpha": weight, "distillation_add_tail": tail}
    assert_same_training(make, tmp_path, accumulation=accumulation, peft=peft, **options)


@pytest.mark.slow
@pytest.mark.parametrize("make", [distillation, sdft, gkd])
def test_half_precision(make: Make, tmp_path: Any):
    """Under bf16 autocast the usual logits are rounded to bf16, which makes ties of neighbours at rank k."""
    usual, fused = (
        trained(make, tmp_path, fused=on, accumulation=1, peft=False, bf16=True) for on in (False, True)
    )
    losses = [[row["loss"] for row in t.state.log_history[:-1]] for t in (usual, fused)]
    assert losses[1] == pytest.approx(losses[0], rel=0.15)


@pytest.mark.slow
@pytest.mark.parametrize("make", [sdpo, sdft])
@pytest.mark.parametrize("kind", ["base", "ema"])
@pytest.mark.parametrize("peft", [False, True], ids=["full", "peft"])
def test_every_kind_of_teacher(make: Make, kind: str, peft: bool, tmp_path: Any):
    """A copy of the student, or an adapter of it, that moves with it or not; loaded from a folder, as TRL does."""

    def from_folder(folder: Any, **options: Any) -> Any:
        return make(
            folder, student=str(tiny.save_model(tmp_path / "model")), teacher_model_kind=kind, **options
        )

    assert_same_training(from_folder, tmp_path / "out", accumulation=4, peft=peft)


@pytest.mark.slow
@pytest.mark.parametrize("make", [sdpo, sdft])
def test_two_updates_for_each_rollout(make: Make, tmp_path: Any):
    assert_same_training(make, tmp_path, accumulation=1, peft=False, num_iterations=2)


@pytest.mark.slow
def test_on_policy_gkd(tmp_path: Any):
    assert_same_training(gkd, tmp_path, accumulation=1, peft=False, lmbda=1.0)


EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["distillation", "gkd", "sdft", "sdpo"])
def test_example(name: str):
    done = subprocess.run(
        [sys.executable, EXAMPLES / f"trl_{name}.py", "--tokens", "8", "--vocabulary", "300"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    usual, fused = ([float(x) for x in pair] for pair in re.findall(r"losses (\S+)  (\S+)", done.stdout))
    assert fused == pytest.approx(usual, abs=2e-4), done.stdout
    assert "memory ratio" in done.stdout


@pytest.mark.slow
def test_peak_memory_of_a_large_vocabulary():
    """2,048 tokens of 151,936 ids in each step: at most a third of what the trainer takes by itself."""
    command = [sys.executable, EXAMPLES / "trl_sdft.py", "--tokens", "256"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    ratio = re.search(r"memory ratio ([\d.]+)", done.stdout)
    assert ratio is not None and float(ratio[1]) >= 3, done.stdout
