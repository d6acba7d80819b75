//! Kernels: the body can be replayed and interpreted, and the entry matches it.

use super::{Result, ensure, launches, name, short};
use crate::plan::{CudaLaunch, DeviceType, Entry, Kernel, Plan, layout, sha256_hex};
use crate::{Graph, Op, OutputKind, verify};

/// Most operations of a body.
const MAX_NODES: usize = 1 << 13;
/// Most scratch memory of a CUDA kernel, in bytes.
const MAX_SCRATCH: usize = 1 << 40;

pub(super) fn check(plan: &Plan) -> Result {
    if let Some(object) = &plan.object {
        let file = layout::kernels(plan.target.device);
        ensure(object.file == file, || {
            format!("the kernels are in `{}`, not in {file}", short(&object.file))
        })?;
    }
    for k in &plan.kernels {
        name(&k.name)?;
        body(&k.body)
            .map_err(|why| super::CheckError(format!("kernel `{}`: {why}", short(&k.name))))?;
        ensure(sha256_hex(k.body.to_string().as_bytes()) == k.hash, || {
            format!("kernel `{}` does not match its hash", short(&k.name))
        })?;
        ensure(has_code(plan, k), || {
            format!("kernel `{}` has no code for this device", short(&k.name))
        })?;
        can_be_called(plan, k).map_err(|why| {
            super::CheckError(format!("kernel `{}` has invalid launches: {why}", short(&k.name)))
        })?;
        ensure(k.is_bound(), || {
            format!("kernel `{}` is not executed as it was compiled", short(&k.name))
        })?;
    }
    Ok(())
}

/// The entry is one of the plan's device; generated code has a file.
fn has_code(plan: &Plan, kernel: &Kernel) -> bool {
    let on = |device: DeviceType| plan.target.device == device;
    match &kernel.entry {
        Entry::Host { .. } => on(DeviceType::Cpu) && plan.object.is_some(),
        Entry::Cuda { .. } => on(DeviceType::Cuda) && plan.object.is_some(),
        Entry::Routine(_) | Entry::Interpreter => on(DeviceType::Cpu),
        Entry::Launches(_) => on(DeviceType::Cuda),
    }
}

fn can_be_called(plan: &Plan, kernel: &Kernel) -> std::result::Result<(), String> {
    let refuse = |fits: bool, why: &str| if fits { Ok(()) } else { Err(why.to_string()) };
    refuse(kernel.entry.scratch_bytes() <= MAX_SCRATCH, "too much scratch memory")?;
    match &kernel.entry {
        Entry::Host { extent, grain, .. } => {
            refuse(*extent <= isize::MAX as usize && *grain > 0, "an impossible range")
        }
        Entry::Cuda { launches, .. } => {
            let fits = |l: &CudaLaunch| {
                !l.grid.contains(&0)
                    && (1..=launches::MAX_BLOCK).contains(&l.block)
                    && l.shared_bytes <= launches::MAX_SHARED
            };
            refuse(!launches.is_empty() && launches.iter().all(fits), "an impossible grid")
        }
        Entry::Launches(selected) => launches::check(plan, &kernel.body, selected),
        Entry::Routine(_) | Entry::Interpreter => Ok(()),
    }
}

/// A body reads its inputs, named by their positions, and constants, and satisfies every invariant of graphs.
fn body(body: &Graph) -> std::result::Result<(), String> {
    if body.len() > MAX_NODES {
        return Err("it has too many operations".into());
    }
    let mut inputs = 0;
    for (_, node) in body.nodes() {
        match &node.op {
            Op::Input(input) if input.name == inputs.to_string() => inputs += 1,
            Op::Input(_) => return Err("its operands are not named by their positions".into()),
            Op::Param(_)
            | Op::State(_)
            | Op::Hyper(_)
            | Op::AllGather(_)
            | Op::ReduceScatter(_)
            | Op::AllReduce(_)
            | Op::Fusion(_) => return Err(format!("`{}` is in its body", node.op.name())),
            _ => {}
        }
    }
    if body.outputs.iter().any(|o| o.kind != OutputKind::Result) {
        return Err("a result is not a plain output".into());
    }
    verify::verify_body(body).map_err(|broken| broken[0].message.clone())
}
