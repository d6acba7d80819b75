//! The best schedule by the cost model: several are made, placed in memory and simulated.
//!
//! Candidates are the fixed schedule `pre` with two units in flight, and schedules that issue every gather
//! with a lead of some times its predicted duration. The fastest that fits the budget is kept, so the
//! choice is never slower in the simulator than that fixed schedule where that one fits; among equally
//! fast ones the one that needs the least memory.

use super::{BackwardPrefetch, Prefetch, schedule};
use crate::cost::Cluster;
use crate::memory;
use crate::simulate::simulate;
use frit_ir::plan::Plan;

/// The schedule that users choose if they do not measure.
pub const USUAL: Prefetch =
    Prefetch::Fixed { backward: BackwardPrefetch::Pre, forward: 1, limit: 2 };

/// Leads, in predicted durations of the gather.
const LEADS: &[f64] = &[1.0, 1.25, 1.5, 2.0, 3.0, 5.0];

/// Times that differ by less than this part are the same.
const SAME: f64 = 1e-3;

/// Schedules a lowered plan for a cluster and assigns its memory. Returns what was chosen, in words.
pub fn choose(plan: &mut Plan, cluster: &Cluster, budget: Option<u64>) -> String {
    let mut candidates = vec![("pre with 2 units in flight".to_string(), USUAL)];
    candidates.extend(LEADS.iter().map(|l| (format!("a lead of {l}"), Prefetch::Lead(*l))));
    let mut best: Option<(bool, f64, u64, String, Plan)> = None;
    let mut usual = 0.0;
    for (name, prefetch) in candidates {
        let mut candidate = plan.clone();
        schedule(&mut candidate, &prefetch);
        memory::assign(&mut candidate);
        let simulation = simulate(&candidate, cluster);
        let (time, peak) = (simulation.step_seconds, simulation.peak_bytes);
        if prefetch == USUAL {
            usual = time;
        }
        let fits = budget.is_none_or(|budget| peak <= budget);
        let better = best.as_ref().is_none_or(|(other_fits, other, least, ..)| match () {
            () if fits != *other_fits => fits,
            () if !fits => peak < *least,
            () if (time / other - 1.0).abs() < SAME => peak < *least && time <= usual,
            () => time < *other,
        });
        if better {
            best = Some((fits, time, peak, name, candidate));
        }
    }
    let Some((_, time, _, name, chosen)) = best else { return String::new() };
    *plan = chosen;
    format!("{name}: {:.3} ms on {}, {:.3} ms with pre", 1e3 * time, cluster.name, 1e3 * usual)
}
