//! Selects parameters to gather together because their collectives are dominated by startup time.

use super::units::Assignment;
use crate::cost::{Cluster, Exchange, Members};
use frit_ir::plan::{Plan, TiVec, UnitId, UnitSpec};
use std::collections::BTreeSet;

/// The unit of such parameters. It stays gathered from forward to backward.
pub const NAME: &str = "small parameters";

/// A collective is small if its bytes take at most this part of the time that it takes without them.
const SMALL: f64 = 0.1;

/// The parameters of all small flat groups of a lowered plan, those of the root left out; none if there is
/// only one such group.
pub fn parameters(plan: &Plan, cluster: &Cluster) -> BTreeSet<String> {
    let is_small = |group: &&frit_ir::plan::Group| {
        let members = Members { n: group.shards(), stride: 1 };
        let narrowest = group.gather_dtypes.iter().map(|d| d.size()).min().unwrap_or(4);
        let seconds =
            |bytes: usize| cluster.exchange(Exchange::AllGather, bytes as u64, members).seconds;
        let start = seconds(0);
        let bytes = group.numel * narrowest;
        group.unit != UnitId::ROOT && group.shards() > 1 && seconds(bytes) - start <= SMALL * start
    };
    let small: Vec<_> = plan.groups.iter().filter(is_small).collect();
    if small.len() < 2 {
        return BTreeSet::new();
    }
    let segments = small.iter().flat_map(|g| &g.segments);
    segments.map(|s| plan.params[s.param].name.clone()).collect()
}

/// Moves these parameters (`name` gives that of a value) into a unit of their own; units that are left with none go.
pub(super) fn into_own_unit(
    assignment: &mut Assignment,
    small: &BTreeSet<String>,
    name: impl Fn(frit_ir::ValueId) -> String,
) {
    let reason = "their collectives would be dominated by start-up time".to_string();
    let unit =
        assignment.units.push_and_get_key(UnitSpec { name: NAME.into(), reason, reshard: None });
    for (value, of) in &mut assignment.unit_of {
        if small.contains(&name(*value)) {
            *of = unit;
        }
    }
    for (param, why) in &mut assignment.reasons {
        if small.contains(param) {
            *why = format!(
                "in unit `{NAME}`: a collective of its own would be dominated by start-up time"
            );
        }
    }
    let mut used: TiVec<UnitId, bool> = vec![false; assignment.units.len()].into();
    used[UnitId::ROOT] = true;
    assignment.unit_of.iter().for_each(|(_, unit)| used[*unit] = true);
    let renumbered: TiVec<UnitId, UnitId> = used
        .iter()
        .scan(0, |next, used| {
            let number = UnitId(*next);
            *next += usize::from(*used);
            Some(number)
        })
        .collect();
    assignment.unit_of.iter_mut().for_each(|(_, unit)| *unit = renumbered[*unit]);
    let mut used = used.into_iter();
    assignment.units.retain(|_| used.next().unwrap_or(false));
}
