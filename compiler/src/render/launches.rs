//! Describes in text how a kernel is executed.

use frit_ir::plan::{Candidate, CudaLaunch, Entry, Launch, Operation, OperationKind, Plan};

/// A word or some for each launch of a kernel of a plan.
pub(crate) fn words(plan: &Plan, entry: &Entry) -> Vec<String> {
    match entry {
        Entry::Host { .. } => vec!["generated".into()],
        Entry::Cuda { launches, .. } => {
            let grid =
                |l: &CudaLaunch| format!("generated {}x{} of {}", l.grid[0], l.grid[1], l.block);
            launches.iter().map(grid).collect()
        }
        Entry::Routine(routine) => vec![format!("routine {}", routine.call.name)],
        Entry::Interpreter => vec!["interpreter".into()],
        Entry::Launches(selected) => {
            selected.launches.iter().map(|l| word(plan, l, true)).collect()
        }
    }
}

/// The same without sizes: what launches of equal kernels have in common.
pub(crate) fn names(plan: &Plan, entry: &Entry) -> Vec<String> {
    match entry {
        Entry::Cuda { launches, .. } => vec!["generated".into(); launches.len()],
        Entry::Launches(selected) => {
            selected.launches.iter().map(|l| word(plan, l, false)).collect()
        }
        entry => words(plan, entry),
    }
}

fn word(plan: &Plan, launch: &Launch, sizes: bool) -> String {
    let sized = |name: &str, size: String| {
        if sizes { format!("{name} {size}") } else { name.to_string() }
    };
    match launch {
        Launch::Generated(launch) => {
            let name = plan.kernels.get(launch.kernel).map(|k| k.name.clone());
            sized("generated", name.unwrap_or_default())
        }
        Launch::Source(kernel) => {
            let [x, y, z] = kernel.grid;
            sized(&kernel.entry, format!("{x}x{y}x{z} of {}", kernel.block))
        }
        Launch::Gemm(gemm) => {
            let name = if gemm.epilogue.is_none() { "gemm" } else { "gemm with epilogue" };
            sized(name, format!("{}x{}x{} by {}", gemm.m, gemm.n, gemm.k, gemm.batch))
        }
        Launch::Operation(launch) => operation(&launch.operation).into(),
        Launch::Copy { bytes, .. } => sized("copy", format!("{bytes} bytes")),
        Launch::Zero { bytes, .. } => sized("zero", format!("{bytes} bytes")),
        Launch::Choice(candidates) => {
            let candidate = |c: &Candidate| {
                let name = c.name.word();
                let launches: Vec<String> =
                    c.launches.iter().map(|l| word(plan, l, sizes)).collect();
                format!("{name}({})", launches.join(", "))
            };
            candidates.iter().map(candidate).collect::<Vec<_>>().join(" or ")
        }
    }
}

fn operation(operation: &Operation) -> &'static str {
    match operation.kind {
        OperationKind::Conv { .. } => "convolution",
        OperationKind::Attention { .. } => "attention",
        OperationKind::AttentionGrad { .. } => "gradient of attention",
        OperationKind::Pool { .. } => "pooling",
        OperationKind::BatchNorm { .. } => "batch normalization",
        OperationKind::BatchNormGrad => "gradient of batch normalization",
    }
}
