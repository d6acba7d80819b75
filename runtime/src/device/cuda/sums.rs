//! Sums over ranks in an order that does not depend on the library: ranks exchange their elements, and a kernel adds them; see
//! [`RankSum`].

use super::command::Command;
use super::modules::Modules;
use crate::RunError;
use frit_cuda::CudaError;
use frit_cuda::driver::{Address, Arguments, Collective, Driver, Exchange, Shape, TeamHandle};
use frit_ir::DType;
use frit_ir::ops::ReduceKind;
use frit_ir::plan::{Action, Plan, RankSum, SourceKernel, layout};

/// Threads per block of the kernel that adds, and most blocks.
const BLOCK: u32 = 256;
const MOST_BLOCKS: usize = 4096;

/// Where a sum is computed.
pub(super) struct Addresses {
    pub(super) send: Address,
    pub(super) recv: Address,
    /// Room for [`RankSum::bytes`].
    pub(super) rows: Address,
}

/// The kernels that add what ranks exchange, each once.
///
/// # Errors
/// A collective that none adds.
pub(super) fn kernels(plan: &Plan) -> Result<Vec<SourceKernel>, RunError> {
    let mut kernels = Vec::new();
    for task in &plan.tasks {
        let Some(sum) = plan.rank_sum(&task.action) else { continue };
        let is_known = match &task.action {
            Action::ReduceScatter { reduce, send, .. } | Action::AllReduce { reduce, send, .. } => {
                *reduce == ReduceKind::Sum && send.ty.dtype == DType::F32
            }
            _ => false,
        };
        if !is_known || !sum.ranks.is_power_of_two() {
            let reason = format!(
                "`{}` is no sum of f32 over a power of two of ranks, as those of a reproducible plan are",
                task.name
            );
            return Err(RunError::Plan { path: layout::PLAN.into(), reason });
        }
        let kernel = kernel(sum.ranks);
        if !kernels.contains(&kernel) {
            kernels.push(kernel);
        }
    }
    Ok(kernels)
}

/// The kernel for so many ranks.
fn kernel(ranks: usize) -> SourceKernel {
    SourceKernel {
        file: "rank_sum".into(),
        defines: vec![("RANKS".into(), ranks.to_string())],
        entry: "rank_sum".into(),
        grid: [1; 3],
        block: BLOCK,
        shared_bytes: 0,
        arguments: vec![],
    }
}

/// The commands of the member `own` of a team.
///
/// # Errors
/// If the kernel is not in its module.
pub(super) fn commands(
    driver: &impl Driver,
    modules: &Modules,
    sum: RankSum,
    (team, own): (TeamHandle, usize),
    at: Addresses,
    is_whole: bool,
) -> Result<Vec<Command>, CudaError> {
    let RankSum { ranks, share, rest } = sum;
    let Addresses { send, recv, rows } = at;
    let function = modules.source(driver, &kernel(ranks))?;
    let bytes = |n: usize| (n * DType::F32.size()) as Address;
    let exchange = |exchange, send, recv, count| {
        Command::Collective(Collective { exchange, team, send, recv, count, dtype: DType::F32 })
    };
    let add = |to: Address, n: usize| {
        let mut arguments = Arguments::default();
        [to, rows, n as u64].into_iter().for_each(|word| arguments.push(word));
        let blocks = n.div_ceil(BLOCK as usize).min(MOST_BLOCKS) as u32;
        let shape = Shape { grid: [blocks, 1, 1], block: BLOCK, shared_bytes: 0 };
        Command::Launch { function, shape, arguments }
    };
    let own_share = if is_whole { recv + bytes(own * share) } else { recv };
    let mut commands =
        vec![exchange(Exchange::AllToAll(ranks), send, rows, share), add(own_share, share)];
    if is_whole {
        commands.push(exchange(Exchange::AllGather, own_share, recv, share));
        let behind = bytes(ranks * share);
        commands.push(exchange(Exchange::AllGather, send + behind, rows, rest));
        commands.push(add(recv + behind, rest));
    }
    Ok(commands)
}
