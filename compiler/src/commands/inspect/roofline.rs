//! `frit inspect --view roofline`: what every kernel moves and computes, what bounds it, and the plan beside its lower bound.

use crate::render::{bytes, seconds, table};
use frit_passes::simulate::roofline::{Roofline, Row};

/// The whole view as text.
pub(super) fn text(roofline: &Roofline) -> String {
    let head = ["kernel", "uses", "bytes", "GFLOP", "FLOP/byte", "bound", "time", "of all", "rate"];
    let row = |row: &Row| {
        vec![
            row.name.clone(),
            row.uses.to_string(),
            bytes(row.bytes),
            format!("{:.2}", row.flops as f64 / 1e9),
            format!("{:.1}", row.flops as f64 / row.bytes.max(1) as f64),
            row.bound.name().to_string(),
            seconds(row.seconds),
            format!("{:.1} %", 100.0 * row.seconds / roofline.seconds.max(f64::MIN_POSITIVE)),
            format!("{}/s", bytes((row.bytes as f64 / row.seconds.max(f64::MIN_POSITIVE)) as u64)),
        ]
    };
    let [least, all] = roofline.ratios();
    let rows: Vec<Vec<String>> = roofline.rows.iter().map(row).collect();
    format!(
        "cluster       {}; kernels in sequence, without communication\n\
         kernels       {}, of which {} bound by arithmetic\n\
         moved         {}\n\
         least         {:.2} times the {} ({}) of weights, gradients and activations that must be in memory, each written and read once:\n\
         \x20             operands of matmuls, attention, norms, reductions, losses and optimizers, and what later operations read\n\
         all values    {:.2} times the {} of all operands and results of these operations, of which fusion keeps some out of memory\n\n{}",
        roofline.cluster,
        seconds(roofline.seconds),
        seconds(roofline.compute_seconds),
        bytes(roofline.bytes),
        least,
        bytes(roofline.least_bytes),
        seconds(roofline.least_seconds),
        all,
        bytes(roofline.model_bytes),
        table(&head, &rows)
    )
}
