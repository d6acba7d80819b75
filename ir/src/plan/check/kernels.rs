//! Kernels: a body that can be replayed and interpreted, and an entry that was made of it.

use super::{Result, ensure, name, short};
use crate::plan::{CudaLaunch, Entry, Kernel, KernelKind, Plan, sha256_hex};
use crate::{Graph, Op, OutputKind, verify};

/// Most operations of a body.
const MAX_NODES: usize = 1 << 13;
/// Most scratch memory of a CUDA kernel, in bytes.
const MAX_SCRATCH: usize = 1 << 40;

pub(super) fn check(plan: &Plan) -> Result {
    if let Some(object) = &plan.object {
        let file = if plan.target.device == "cpu" { "kernels.so" } else { "kernels.ptx" };
        ensure(object.file == format!("kernels/{file}"), || {
            format!("the kernels are in `{}`, not in kernels/{file}", short(&object.file))
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
        ensure(k.entry.as_ref().is_none_or(can_be_called), || {
            format!("kernel `{}` cannot be launched as it says", short(&k.name))
        })?;
        ensure(k.entry.as_ref().is_none_or(|entry| entry.is_bound(&k.name, &k.hash)), || {
            format!("kernel `{}` is called otherwise than its code was made", short(&k.name))
        })?;
    }
    Ok(())
}

/// A generated kernel, and no other, is in the object file.
fn has_code(plan: &Plan, kernel: &Kernel) -> bool {
    let device = plan.target.device.as_str();
    match (kernel.kind, &kernel.entry) {
        (KernelKind::Generated, Some(Entry::Host { .. })) => {
            device == "cpu" && plan.object.is_some()
        }
        (KernelKind::Generated, Some(Entry::Cuda { .. })) => {
            device == "cuda" && plan.object.is_some()
        }
        (KernelKind::Generated, None) => false,
        (_, entry) => entry.is_none(),
    }
}

fn can_be_called(entry: &Entry) -> bool {
    match entry {
        Entry::Host { extent, grain, .. } => *extent <= isize::MAX as usize && *grain > 0,
        Entry::Cuda { launches, scratch_bytes } => {
            let fits = |l: &CudaLaunch| !l.grid.contains(&0) && (1..=1024).contains(&l.block);
            !launches.is_empty() && launches.iter().all(fits) && *scratch_bytes <= MAX_SCRATCH
        }
    }
}

/// A body reads its inputs, called by their positions, and constants, and holds every law of graphs.
fn body(body: &Graph) -> std::result::Result<(), String> {
    if body.len() > MAX_NODES {
        return Err("it has too many operations".into());
    }
    let mut inputs = 0;
    for (_, node) in body.nodes() {
        match &node.op {
            Op::Input(input) if input.name == inputs.to_string() => inputs += 1,
            Op::Input(_) => return Err("its operands are not called by their positions".into()),
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
        return Err("a result has a meaning of its own".into());
    }
    verify::verify_body(body).map_err(|broken| broken[0].message.clone())
}
