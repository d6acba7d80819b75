//! Fits a plan into the memory budget by more chunks of the loss, rematerialization and offload.

use super::Compilation;
use crate::diagnostics::Report;
use crate::render::bytes;
use frit_ir::plan::DeviceType;
use frit_ir::{Code, Diagnostic};
use frit_passes::chunk_loss::Chunks;
use frit_passes::offload::Offload;
use frit_passes::recompute::{Recompute, stages};
use frit_passes::simulate::simulate;
use std::collections::BTreeSet;

/// Measures that reduce memory.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Saving {
    /// What backward recomputes.
    pub(super) recompute: Recompute,
    /// What is stored in host memory.
    pub(super) offload: Offload,
    /// The chunks in which logits, their loss and their gradient are computed.
    pub(super) chunks: Chunks,
}

/// Requirements of a plan.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Needs {
    /// Arena bytes of a rank's device.
    pub(super) peak_bytes: u64,
    /// Predicted seconds of a step.
    pub(super) seconds: f64,
}

impl Compilation<'_> {
    /// The offload that the configuration asks for, if it does not leave it to the budget.
    pub(super) fn asked_offload(&self) -> Option<Offload> {
        let config = self.setup.config;
        match config.memory.offload {
            Some(Offload::None) if config.sharding.cpu_offload => Some(Offload::Parameters),
            offload => offload,
        }
    }

    /// The least that backward recomputes if the configuration does not say: on the CPU cheap values, which costs about a
    /// hundredth of a step and spares a tenth of the memory (docs/performance.md), on GPUs nothing.
    fn least_recompute(&self) -> Recompute {
        match self.setup.config.target.device {
            DeviceType::Cpu => Recompute::SELECTIVE,
            DeviceType::Cuda => Recompute::NONE,
        }
    }

    /// The recomputation and the offload that the configuration asks for. What it leaves to the budget is the least
    /// with which the plan fits: the least recomputation of the device if that fits, else the fastest by prediction of the
    /// least recomputation without offload, with the optimizer's state and with parameters on the host; and in words why.
    ///
    /// # Errors
    /// If the plan does not fit, with the smallest budget that would do.
    pub(super) fn choose_saving(&self) -> Result<(Saving, Option<String>), Report> {
        let (recompute, offload) = (self.setup.config.memory.recompute, self.asked_offload());
        let chunks = self.setup.options.chunks;
        match (self.setup.config.memory.budget, recompute, offload) {
            (Some(budget), ..) => {
                Search { compilation: self, recompute, offload, chunks, budget }.fastest()
            }
            (None, recompute, Some(offload)) => {
                let recompute = recompute.unwrap_or_else(|| self.least_recompute());
                Ok((Saving { recompute, offload, chunks }, None))
            }
            (None, _, None) => {
                let message =
                    "`memory.offload = auto` offloads what `memory.budget` asks for, which is none";
                let help = "set memory.budget, for example \"70GiB\", or choose \"optimizer\" or \"parameters\"";
                Err(Diagnostic::error(Code::NeedsAnotherSetting, message).help(help).into())
            }
        }
    }

    /// Requirements of the plan with this saving.
    fn needs(&self, saving: Saving) -> Result<Needs, Report> {
        let plan = self.trial(saving, &BTreeSet::new())?.arrange()?.lowered.plan;
        let simulation = simulate(&plan, &self.setup.cluster);
        Ok(Needs { peak_bytes: simulation.peak_bytes, seconds: simulation.step_seconds })
    }
}

/// What was chosen, if there was a choice.
fn words(
    tried: &[Offload],
    fitting: &[(Saving, Needs)],
    chosen: &Saving,
    budget: u64,
) -> Option<String> {
    if tried.len() == 1 {
        return None;
    }
    let one = |(saving, needs): &(Saving, Needs)| {
        let recompute = match saving.recompute {
            Recompute::NONE => String::new(),
            Recompute::SELECTIVE => " with selective recomputation".into(),
            Recompute { stages, .. } if stages == Recompute::UNIT.stages => {
                " with all units recomputed".into()
            }
            Recompute { stages, .. } => format!(" with {stages} units recomputed"),
        };
        let what = name(saving.offload);
        let chunks =
            if saving.chunks == Chunks::Most { " and the loss in more chunks" } else { "" };
        format!(
            "{what}{recompute}{chunks}: {}, {:.3} ms",
            bytes(needs.peak_bytes),
            1e3 * needs.seconds
        )
    };
    let all: Vec<String> = fitting.iter().map(one).collect();
    let what = name(chosen.offload);
    Some(format!("{what}, the fastest within {} of: {}", bytes(budget), all.join("; ")))
}

fn name(offload: Offload) -> &'static str {
    match offload {
        Offload::None => "no offload",
        Offload::Optimizer => "optimizer state offloaded",
        Offload::Parameters => "optimizer state and parameters offloaded",
    }
}

/// The search for the least saving within a budget.
struct Search<'a, 'c> {
    compilation: &'a Compilation<'c>,
    /// The recomputation that is asked for, if any is.
    recompute: Option<Recompute>,
    /// The offload that is asked for, if any is.
    offload: Option<Offload>,
    /// The chunks that are asked for.
    chunks: Chunks,
    budget: u64,
}

impl Search<'_, '_> {
    /// The fastest of the least savings that fit, and why.
    fn fastest(&self) -> Result<(Saving, Option<String>), Report> {
        let offloads = match self.offload {
            Some(offload) => vec![offload],
            None => vec![Offload::None, Offload::Optimizer, Offload::Parameters],
        };
        let mut fitting: Vec<(Saving, Needs)> = Vec::new();
        for &offload in &offloads {
            let Some((saving, found)) = self.least(offload)? else { continue };
            fitting.push((saving, found));
            if fitting.len() == 1 && saving.recompute == self.first() {
                break;
            }
        }
        let fastest = fitting.iter().min_by(|a, b| a.1.seconds.total_cmp(&b.1.seconds));
        match fastest {
            Some((saving, _)) => Ok((*saving, words(&offloads, &fitting, saving, self.budget))),
            None => Err(self.too_small(offloads[0])?),
        }
    }

    /// Requirements of a plan with the chunks that are asked for.
    fn needs(&self, recompute: Recompute, offload: Offload) -> Result<Needs, Report> {
        self.compilation.needs(Saving { recompute, offload, chunks: self.chunks })
    }

    /// Requirements of a plan with the most chunks, or those that are asked for.
    fn least_needs(&self, recompute: Recompute, offload: Offload) -> Result<Needs, Report> {
        let needs = self.needs(recompute, offload)?;
        if self.chunks != Chunks::Auto || needs.peak_bytes <= self.budget {
            return Ok(needs);
        }
        let more = self.compilation.needs(Saving { recompute, offload, chunks: Chunks::Most })?;
        Ok(if more.peak_bytes < needs.peak_bytes { more } else { needs })
    }

    /// Requirements of a plan, if it fits: with the chunks that are asked for, else with the most if there is a choice.
    fn fits(
        &self,
        recompute: Recompute,
        offload: Offload,
    ) -> Result<Option<(Saving, Needs)>, Report> {
        let choices: &[Chunks] = match self.chunks {
            Chunks::Auto => &[Chunks::Auto, Chunks::Most],
            ref asked => std::slice::from_ref(asked),
        };
        for &chunks in choices {
            let saving = Saving { recompute, offload, chunks };
            let needs = self.compilation.needs(saving)?;
            if needs.peak_bytes <= self.budget {
                return Ok(Some((saving, needs)));
            }
        }
        Ok(None)
    }

    /// The recomputation that is tried first: the one that is asked for, or the least.
    fn first(&self) -> Recompute {
        self.recompute.unwrap_or_else(|| self.compilation.least_recompute())
    }

    /// The most that can be recomputed.
    fn most(&self) -> Result<Recompute, Report> {
        Ok(Recompute { stages: stages(&self.compilation.graph)?, selective: true })
    }

    /// The least recomputation with which the plan fits: that of the device, then the cheap values, then more and more
    /// stages whole.
    fn least(&self, offload: Offload) -> Result<Option<(Saving, Needs)>, Report> {
        if let Some(asked) = self.recompute {
            return self.fits(asked, offload);
        }
        for recompute in [self.first(), Recompute::SELECTIVE] {
            if let Some(found) = self.fits(recompute, offload)? {
                return Ok(Some(found));
            }
        }
        let most = self.most()?;
        if most.stages == 0 {
            return Ok(None);
        }
        let Some(mut best) = self.fits(most, offload)? else {
            // What selective recomputation keeps for one stage may be live in another.
            return self.fits(Recompute::UNIT, offload);
        };
        let (mut too_few, mut enough) = (0, most.stages);
        while enough - too_few > 1 {
            let middle = too_few + (enough - too_few) / 2;
            match self.fits(Recompute { stages: middle, ..most }, offload)? {
                Some(found) => (enough, best) = (middle, found),
                None => too_few = middle,
            }
        }
        Ok(Some(best))
    }

    /// The least that a plan needs with some recomputation.
    fn smallest(&self, offload: Offload) -> Result<u64, Report> {
        let mut smallest = u64::MAX;
        let any = [Recompute::NONE, Recompute::SELECTIVE, Recompute::UNIT, self.most()?];
        for recompute in any.into_iter().chain(self.recompute) {
            smallest = smallest.min(self.least_needs(recompute, offload)?.peak_bytes);
        }
        Ok(smallest)
    }

    /// The error that names the memory needed with the first offload that was tried, and the
    /// smallest budgets that would do.
    fn too_small(&self, offload: Offload) -> Result<Report, Report> {
        let needed = self.needs(self.first(), offload)?.peak_bytes;
        let message = format!(
            "the plan needs {} per rank, more than `memory.budget` = {}",
            bytes(needed),
            bytes(self.budget)
        );
        let with = |smallest: u64, settings: &[&str]| match settings {
            [] => format!("{smallest} bytes"),
            settings => format!("{smallest} bytes, with {}", settings.join(" and ")),
        };
        let smallest = self.smallest(offload)?;
        let other = self.recompute.is_some() && smallest < needed;
        let recompute = if other { &["memory.recompute = \"auto\""][..] } else { &[] };
        let mut help = format!("the smallest sufficient budget is {}", with(smallest, recompute));
        let offloaded = self.smallest(Offload::Parameters)?;
        if offloaded < smallest {
            let settings = [recompute, &["memory.offload = \"auto\""]].concat();
            help += &format!("; or {}", with(offloaded, &settings));
        }
        help += "; or use more ranks or a smaller batch";
        Ok(Diagnostic::error(Code::BudgetTooSmall, message).help(help).into())
    }
}
