//! The memory budget: how much is recomputed so that the plan fits.

use crate::commands::bytes;
use crate::config::Config;
use crate::config::choices;
use crate::diagnostics::Report;
use frit_ir::{Diagnostic, Graph};
use frit_passes::recompute::{Recompute, stages};

/// The recomputation that the configuration asks for; with `auto`, the least with which the plan fits
/// `memory.budget`. `peak` gives the bytes of the plan with a recomputation.
///
/// # Errors
/// If the plan does not fit, with the smallest budget that would do.
pub(crate) fn recompute(
    graph: &Graph,
    config: &Config,
    peak: &dyn Fn(Recompute) -> Result<u64, Report>,
) -> Result<Recompute, Report> {
    let asked = match config.memory.recompute {
        choices::Recompute::None => Some(Recompute::NONE),
        choices::Recompute::Unit => Some(Recompute::UNIT),
        choices::Recompute::Selective => Some(Recompute::SELECTIVE),
        choices::Recompute::Auto => None,
    };
    match (asked, config.memory.budget) {
        (Some(asked), None) => Ok(asked),
        (None, None) => Err(Diagnostic::error(
            "E057",
            "`memory.recompute = auto` recomputes as much as `memory.budget` asks for, which is none",
        )
        .help("set memory.budget, for example \"70GiB\", or choose \"unit\" or \"selective\"")
        .into()),
        (Some(asked), Some(budget)) => match peak(asked)? {
            fits if fits <= budget => Ok(asked),
            needed => Err(too_small(budget, needed, most(graph)?, peak)?),
        },
        (None, Some(budget)) => least(graph, budget, peak),
    }
}

/// The most that can be recomputed.
fn most(graph: &Graph) -> Result<Recompute, Report> {
    Ok(Recompute { stages: stages(graph)?, selective: true })
}

/// The least recomputation with which the plan fits: none, then the cheap values, then more and more
/// stages whole.
fn least(
    graph: &Graph,
    budget: u64,
    peak: &dyn Fn(Recompute) -> Result<u64, Report>,
) -> Result<Recompute, Report> {
    let without = peak(Recompute::NONE)?;
    if without <= budget {
        return Ok(Recompute::NONE);
    }
    if peak(Recompute::SELECTIVE)? <= budget {
        return Ok(Recompute::SELECTIVE);
    }
    let most = most(graph)?;
    if most.stages == 0 || peak(most)? > budget {
        return Err(too_small(budget, without, most, peak)?);
    }
    let (mut too_few, mut enough) = (0, most.stages);
    while enough - too_few > 1 {
        let middle = too_few + (enough - too_few) / 2;
        match peak(Recompute { stages: middle, ..most })? <= budget {
            true => enough = middle,
            false => too_few = middle,
        }
    }
    Ok(Recompute { stages: enough, ..most })
}

/// The error that names what is needed, and the smallest budget that some recomputation would do with.
fn too_small(
    budget: u64,
    needed: u64,
    most: Recompute,
    peak: &dyn Fn(Recompute) -> Result<u64, Report>,
) -> Result<Report, Report> {
    let mut smallest = needed;
    for other in [Recompute::NONE, Recompute::SELECTIVE, Recompute::UNIT, most] {
        smallest = smallest.min(peak(other)?);
    }
    let message = format!(
        "the plan needs {} per rank, more than `memory.budget` = {}",
        bytes(needed),
        bytes(budget)
    );
    let help = match smallest < needed {
        true => format!(
            "the smallest budget that would do is {smallest} bytes, with memory.recompute = \"auto\"; \
             or use more ranks or a smaller batch"
        ),
        false => format!(
            "the smallest budget that would do is {smallest} bytes; or use more ranks or a smaller batch"
        ),
    };
    Ok(Diagnostic::error("E058", message).help(help).into())
}
