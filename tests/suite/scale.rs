//! What compiling does grows with the number of blocks as the plan does, and what blocks share is done once.
//! Times are in docs/performance.md.

use crate::support::file;
use frit::config::Config;
use frit::driver::{Request, compile};
use frit_ir::plan::Plan;

fn plan(layers: usize) -> Plan {
    let settings = ["sharding.ranks=64", "memory.recompute=unit", "target.device=cuda"];
    let config = Config::load(None, &settings.map(String::from)).unwrap_or_else(|e| panic!("{e}"));
    let sizes = [("batch", 1), ("layers", layers), ("width", 256), ("heads", 2), ("kv_heads", 1)];
    let more = [("ffn", 512), ("vocab", 1024), ("seq", 128)];
    let request = Request {
        model: file("examples/llama/model.json"),
        binds: sizes.into_iter().chain(more).map(|(name, n)| (name.to_string(), n)).collect(),
        ..Request::default()
    };
    let compiled = compile(&request, &config, &mut ()).unwrap_or_else(|e| panic!("{e}"));
    compiled.expect("no pass was asked to stop").plan
}

/// The number before these words in the report of a pass.
fn reported(plan: &Plan, pass: &str, words: &str) -> usize {
    let reports = plan.reports.iter().filter(|r| r.pass == pass).flat_map(|r| &r.remarks);
    let mut numbers = reports.filter_map(|(text, _)| text.strip_suffix(words)?.trim().parse().ok());
    numbers.next().unwrap_or_else(|| panic!("{pass} reports no number of {words}"))
}

#[test]
fn work_grows_with_the_number_of_blocks_and_no_faster() {
    // With more blocks the statistics of all flat groups are no single sum.
    let [three, six, twelve] = [3, 6, 12].map(plan);
    // Every block adds the same.
    let grows = |of: fn(&Plan) -> usize| {
        let (first, second) = (of(&six) - of(&three), of(&twelve) - of(&six));
        assert_eq!(second, 2 * first);
    };
    grows(|p| p.tasks.len());
    grows(|p| p.buffers.iter().filter(|b| b.bytes > 0).count());
    grows(|p| p.tasks.iter().map(|t| t.waits.len()).sum());
    // Kernels are compiled once, and windows of one form solved once.
    assert_eq!(twelve.kernels.len(), six.kernels.len());
    let solved = |plan: &Plan| reported(plan, "simplify", "of them differ");
    assert_eq!(solved(&twelve), solved(&six));
    assert!(solved(&six) < six.tasks.len() / 4);
}
