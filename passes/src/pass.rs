//! The trait of passes: a transformation of the graph with its contract as data.

use crate::adapter::Adapted;
use frit_ir::plan::{CastBaseline, IndexRange, MetricSpec, TiVec, UnitId, UnitSpec};
use frit_ir::{Code, DType, Diagnostic, Graph, GraphError, Origin};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// A fact about a graph that some passes establish and others need.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Property {
    /// A scalar loss is an output (`loss_sum`, `loss_count`).
    HasLoss,
    /// No constant expression, duplicate or dead node is left.
    Canonical,
    /// Composite operations that exporters decompose are single nodes.
    Raised,
    /// The ranges of inputs that are read as indices are known.
    IndexRanges,
    /// Every node has the dtype that the precision policy gives it.
    Autocast,
    /// Functions have no boundaries.
    Stripped,
    /// Gradients of all trainable parameters are outputs.
    Differentiated,
    /// The backward pass is seeded with the loss scale.
    LossScaled,
    /// Optimizer steps and all state are in the graph.
    Updated,
    /// Parameters are in units and collectives are in the graph.
    Sharded,
    /// Regions that run as one kernel are single nodes.
    Fused,
}

impl fmt::Display for Property {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Property::HasLoss => "a loss",
            Property::Canonical => "a canonical graph",
            Property::Raised => "composite operations",
            Property::IndexRanges => "the ranges of indices",
            Property::Autocast => "the precision of every node",
            Property::Stripped => "functions without boundaries",
            Property::Differentiated => "gradients",
            Property::LossScaled => "a scaled loss",
            Property::Updated => "the update of the parameters",
            Property::Sharded => "units and collectives",
            Property::Fused => "fused regions",
        })
    }
}

/// Whether a pass may change the numbers that the graph computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Numerics {
    /// Results stay equal bit for bit.
    Bitwise,
    /// Sums may be taken in another order.
    Reassociates,
    /// Values may be rounded to a lower precision.
    LowersPrecision,
}

/// The contract of a pass.
#[derive(Debug)]
pub struct PassInfo {
    /// Its name: the file, the flag, the log label and the test folder.
    pub name: &'static str,
    /// What it does, in one line.
    pub summary: &'static str,
    /// What must hold before.
    pub requires: &'static [Property],
    /// What holds after.
    pub ensures: &'static [Property],
    /// What may no longer hold after.
    pub breaks: &'static [Property],
    /// Whether it may change numbers.
    pub numerics: Numerics,
}

/// Whether a pass did anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Changed {
    /// It edited the graph.
    Yes,
    /// The graph is as before.
    No,
}

impl Changed {
    /// `Yes` if `condition`.
    pub fn when(condition: bool) -> Changed {
        if condition { Changed::Yes } else { Changed::No }
    }
}

/// Something a pass did or decided, for the plan's report.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Remark {
    /// The change and its reason, in one line.
    pub message: String,
    /// Where.
    pub origin: Origin,
}

/// What a pass reports while it runs.
#[derive(Debug, Default)]
pub struct PassContext {
    /// What it did.
    pub remarks: Vec<Remark>,
    /// Warnings for the user.
    pub warnings: Vec<Diagnostic>,
    /// The adapters of weights, by name, once `adapter` has run.
    pub adapters: BTreeMap<String, Adapted>,
    /// FSDP units, once `shard` has run.
    pub units: TiVec<UnitId, UnitSpec>,
    /// Metrics of an evaluation besides the losses, once `evaluate` has run.
    pub metrics: Vec<MetricSpec>,
    /// The casts of PyTorch's autocast, once `autocast` has run.
    pub cast_baseline: Option<CastBaseline>,
    /// Ranges of inputs that are read as indices, by name, once `index_ranges` has run.
    pub index_ranges: BTreeMap<String, Vec<IndexRange>>,
    /// The unit of each parameter, by name. If it is known before `shard` runs, it is kept.
    pub unit_of: BTreeMap<String, UnitId>,
    /// The dtype in which each parameter is stored, by name. If it is known before `hold_frozen` runs, it is kept.
    pub held: BTreeMap<String, DType>,
    /// The dtypes in which the evaluation of a training reads parameters, by name, for `hold_frozen`.
    pub evaluated: BTreeMap<String, BTreeSet<DType>>,
}

impl PassContext {
    /// Records something done at `origin`.
    pub fn remark(&mut self, origin: &Origin, message: impl Into<String>) {
        self.remarks.push(Remark { message: message.into(), origin: origin.clone() });
    }

    /// Records a warning.
    pub fn warn(&mut self, warning: Diagnostic) {
        self.warnings.push(warning);
    }
}

/// A transformation of the graph. Its configuration is bound when it is built.
pub trait Pass {
    /// Its contract.
    fn info(&self) -> &'static PassInfo;

    /// Transforms the graph. After an error the graph is invalid.
    ///
    /// # Errors
    /// What the user must change, or a broken invariant of the compiler (code `B…`).
    fn run(&self, graph: &mut Graph, context: &mut PassContext) -> Result<Changed, Diagnostic>;
}

/// The diagnostic for a node that a pass built wrongly.
pub(crate) fn bug(pass: &str) -> impl Fn(GraphError) -> Diagnostic + '_ {
    move |e| {
        Diagnostic::error(Code::PassFailed, format!("internal error in pass `{pass}`: {}", e.error))
            .at(&e.origin)
            .note(format!("operation {} with operands {}", e.op, e.operands))
            .help("this is a bug in frit; please report it with the model")
    }
}
