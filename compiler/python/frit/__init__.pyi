from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from types import TracebackType
from typing import Any, Literal, Optional, TypedDict, Union

_Path = Union[str, PathLike[str]]
_Batch = Union[Mapping[str, Any], Sequence[Any]]
_Row = dict[str, Any]

__version__: str

class FritError(Exception):
    diagnostics: list[dict[str, Any]]
    code: Optional[str]
    node: Optional[str]
    scope: Optional[str]
    remedy: Optional[str]
    notes: list[str]

class FritWarning(UserWarning): ...

class StepMetrics(TypedDict):
    step: int
    loss: float
    grad_norm: float
    lr: float
    loss_scale: float
    skipped: bool
    tokens_or_examples_per_s: float
    step_seconds: float
    memory_bytes: Optional[int]

class Loss(TypedDict):
    name: str
    weight: float
    loss: float
    count: float

class Evaluation(TypedDict):
    loss: Optional[float]
    losses: list[Loss]
    metrics: dict[str, float]
    examples: int
    batches: int
    examples_per_s: float

def compile(
    model: Any,
    /,
    example_inputs: Any = None,
    *,
    loss: Union[str, Mapping[str, Any], None] = None,
    precision: Any = None,
    ranks: Optional[int] = None,
    config: Union[_Path, Mapping[str, Any], None] = None,
    bind: Optional[Mapping[str, int]] = None,
    output: Optional[_Path] = None,
    **options: Any,
) -> Plan: ...
def load(directory: _Path) -> Plan: ...

class Plan:
    module: Any
    @property
    def path(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def ranks(self) -> int: ...
    @property
    def batch(self) -> int: ...
    @property
    def examples_per_step(self) -> int: ...
    @property
    def config(self) -> str: ...
    @property
    def inputs(self) -> list[_Row]: ...
    @property
    def parameters(self) -> list[str]: ...
    @property
    def summary(self) -> _Row: ...
    @property
    def units(self) -> list[_Row]: ...
    @property
    def casts(self) -> list[_Row]: ...
    @property
    def schedule(self) -> list[_Row]: ...
    @property
    def memory(self) -> list[_Row]: ...
    @property
    def kernels(self) -> list[_Row]: ...
    @property
    def lints(self) -> list[_Row]: ...
    def verify(self) -> list[_Row]: ...
    def simulate(self, cluster: Optional[_Path] = None) -> _Row: ...
    def diff(self, other: Plan) -> _Row: ...
    def report(
        self,
        path: _Path = "report.html",
        *,
        metrics: Union[_Path, Iterable[_Path]] = (),
        trace: Optional[_Path] = None,
    ) -> None: ...
    def save(self, directory: _Path) -> None: ...
    def trainer(
        self,
        *,
        weights: Union[_Path, Sequence[_Path], None] = None,
        checkpoint: Optional[_Path] = None,
        checkpoint_every: Optional[int] = None,
        keep: Optional[int] = None,
        resume: bool = False,
        metrics: Optional[_Path] = None,
        threads: Optional[int] = None,
        max_skipped: Optional[int] = None,
        evaluation: bool = True,
        **hyper: Any,
    ) -> Trainer: ...

class Trainer:
    plan: Plan
    @property
    def rank(self) -> int: ...
    @property
    def steps(self) -> int: ...
    def __enter__(self) -> Trainer: ...
    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None: ...
    def step(self, batch: _Batch) -> StepMetrics: ...
    def evaluate(self, batches: Union[Mapping[str, Any], Iterable[_Batch]]) -> Evaluation: ...
    def state_dict(
        self, *, framework: Optional[Literal["numpy", "torch"]] = None, average: bool = False
    ) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...
    def save(self, path: _Path, *, average: bool = False) -> None: ...
    def save_adapter(self, folder: _Path, *, average: bool = False) -> None: ...
    def export(
        self,
        path: _Path,
        *,
        average: bool = False,
        training: bool = False,
        external_data: bool = False,
    ) -> None: ...
    def checkpoint(self) -> None: ...
    def close(self) -> None: ...
