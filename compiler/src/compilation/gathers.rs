//! Selects parameters to gather together across units, when `sharding.prefetch = "auto"` chooses the schedule.

use super::Compilation;
use crate::config::choices::Prefetch;
use crate::diagnostics::Report;
use frit_ir::plan::Plan;
use frit_passes::schedule::auto;
use frit_passes::shard::small;
use std::collections::BTreeSet;

impl Compilation<'_> {
    /// The small parameters, if the usual schedule is then faster: the best one is not slower.
    pub(super) fn small_parameters(&self) -> Result<BTreeSet<String>, Report> {
        let (config, cluster) = (self.setup.config, &self.setup.cluster);
        let none = BTreeSet::new();
        if config.sharding.prefetch != Prefetch::Auto {
            return Ok(none);
        }
        let gathering = |small: &BTreeSet<String>| -> Result<Plan, Report> {
            Ok(self.trial(self.saving, small)?.lowered()?.plan)
        };
        let apart = gathering(&none)?;
        let small = small::parameters(&apart, cluster);
        if small.is_empty() {
            return Ok(none);
        }
        let usual = |plan: &Plan| auto::usual(plan, cluster, config.memory.budget);
        let is_faster = usual(&gathering(&small)?).is_better_than(&usual(&apart));
        Ok(if is_faster { small } else { none })
    }
}
