//! The policy table: the precision class of every operation that a model can have, as `frit inspect --view casts` and docs/precision.md
//! print it.

use frit_ir::Op;
use frit_ir::ops::precision::{Class, Source};

/// One row of the op-safety table: operations of one name that have one class.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// The operation, for a reduction with its function.
    pub op: String,
    /// Its class.
    pub class: Class,
    /// Its source.
    pub source: Source,
}

/// The op-safety table: every operation that a model can have, by name.
pub fn table() -> Vec<Row> {
    let row = |op: &Op| {
        let name = match op {
            Op::Reduce(r) => format!("reduce {:?}", r.f).to_lowercase(),
            op => op.name().into(),
        };
        Row { op: name, class: op.precision().class, source: op.precision().source }
    };
    let ops = Op::examples();
    let mut rows: Vec<Row> =
        ops.iter().filter(|op| op.precision().is_of_models()).map(row).collect();
    rows.sort_by(|a, b| a.op.cmp(&b.op));
    // Functions of a scatter have no names of their own.
    rows.dedup();
    rows
}
