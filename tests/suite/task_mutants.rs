//! What the checker reads from the tasks of a plan, against plans that were changed at random: executed in the order of the list, one that
//! computes something else is never shown to compute the graph that was lowered. Digests of lowering play no part.
//!
//! `FRIT_MUTANTS` sets their number.

use crate::certificate::{compiled, configured};
use crate::machine::{Machine, Random};
use crate::mutants::{KINDS, STEPS, TRIES, models};
use crate::pass_trace::begin;
use frit::pass_trace::read;
use frit_ir::plan::{Plan, Stream, check};
use frit_ir::{Graph, Tensor};
use frit_verify::{Comparer, Ranks, Tasks};
use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::Arc;

/// Mutants, unless `FRIT_MUTANTS` says otherwise.
const MUTANTS: usize = 700;

/// A plan, and the graph that was lowered to it.
struct Subject {
    plan: Plan,
    constants: Vec<(String, Tensor)>,
    by_name: HashMap<String, Tensor>,
    graph: Arc<Graph>,
    ranks: Ranks,
}

impl Subject {
    fn new(model: &Path, settings: &[&str]) -> Subject {
        let (request, config) = configured(&model.to_string_lossy(), 2, settings);
        let made = compiled(&request, &config);
        let (stages, _) = read(&made.pass_trace, &begin(&request, &config)).expect("a trace");
        let graph = stages.last().expect("passes").graph.clone();
        let (plan, constants) = (made.plan, made.constants);
        let shards = plan.groups.iter().map(|group| group.shards()).max().unwrap_or(1);
        let ranks = Ranks { shards, replicas: plan.world_size / shards };
        let by_name = constants.iter().cloned().collect();
        Subject { plan, constants, by_name, graph, ranks }
    }

    /// Whether tasks are shown to compute the graph, but for the order of sums.
    fn holds(&self, comparer: &mut Comparer, plan: &Plan) -> Result<(), String> {
        let tasks = Tasks::new(plan, &self.graph, &self.by_name, (self.ranks, None))
            .map_err(|e| e.to_string())?;
        let found = comparer.compare(&tasks.expected, &tasks.computed, self.ranks);
        found.first().map_or(Ok(()), |first| Err(format!("{}: {}", first.output, first.what)))
    }

    /// What the tasks leave when they run in the order of the list; nothing if they cannot.
    fn outcome(&self, plan: &Plan) -> Option<Vec<u8>> {
        let mut plan = plan.clone();
        for task in &mut plan.tasks {
            task.stream = Stream::Compute;
            task.waits.clear();
        }
        let mut machine = Machine::new(&plan, &self.constants);
        machine.run(STEPS, 0).ok()?;
        Some(machine.outcome(&self.plan))
    }
}

#[test]
fn tasks_that_compute_something_else_are_not_shown_to_compute_the_graph() {
    let wanted = std::env::var("FRIT_MUTANTS").ok().and_then(|n| n.parse().ok()).unwrap_or(MUTANTS);
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("model.json");
    let subject = |(model, settings): (&str, Vec<&str>)| {
        std::fs::write(&path, model).expect("written");
        Subject::new(&path, &settings)
    };
    let subjects: Vec<Subject> = models().into_iter().map(subject).collect();
    let mut comparer = Comparer::of_rounded_numbers();
    let mut expected = vec![];
    for (p, subject) in subjects.iter().enumerate() {
        let found = subject.holds(&mut comparer, &subject.plan);
        assert!(found.is_ok(), "plan {p}: {}", found.unwrap_err());
        expected.push(subject.outcome(&subject.plan).expect("the plan runs"));
    }
    // By kind: those that compute something else, and those that do not, each as shown and not shown.
    let mut counts: BTreeMap<&str, [usize; 4]> = BTreeMap::new();
    let mut random = Random::new(19);
    let (mut made, mut turn) = (0, 0);
    while made < wanted {
        let (p, k) = (turn % subjects.len(), turn / subjects.len() % KINDS.len());
        turn += 1;
        let ((name, mutate), subject) = (KINDS[k], &subjects[p]);
        let changed = |_| {
            let mut mutant = subject.plan.clone();
            (mutate(&mut mutant, &mut random) && mutant != subject.plan).then_some(mutant)
        };
        let Some(mutant) = (0..TRIES).find_map(changed) else { continue };
        made += 1;
        // What the loader refuses is no plan.
        if check(&mutant).is_err() {
            continue;
        }
        let is_shown = subject.holds(&mut comparer, &mutant).is_ok();
        let is_same = subject.outcome(&mutant).as_ref() == Some(&expected[p]);
        assert!(is_same || !is_shown, "mutant {made} of plan {p} is shown: {name}");
        counts.entry(name).or_default()[2 * usize::from(is_same) + usize::from(!is_shown)] += 1;
    }
    eprintln!("of those that compute something else and of others, shown and not shown:");
    counts.iter().for_each(|(name, count)| eprintln!("  {name}: {count:?}"));
    let others: usize = counts.values().map(|count| count[1]).sum();
    assert!(others * 4 > wanted, "{counts:?}");
}
