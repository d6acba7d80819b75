//! What is known of every pass and of every output: bits, rounded numbers and real numbers are compared in a thread each.

use super::{Checked, Duty, Kept, Step, Verdict};
use frit_ir::{Graph, Origin};
use frit_passes::{differentiate, loss, shard, update};
use frit_verify::{Comparer, Difference, Roundings, on_large_stack, roundings};
use std::collections::BTreeSet;
use std::sync::OnceLock;
use std::sync::mpsc::channel;
use std::thread;

/// What is known of a pass, and the outputs that are not known to have the same bits, the same roundings and the same real value.
pub(super) struct Found {
    pub(super) pass: Checked,
    /// The outputs for which a region keeps a value in f32 that was rounded before.
    wide: BTreeSet<String>,
    differences: [Vec<Difference>; 3],
}

impl Found {
    /// What is known of an output.
    fn of(&self, output: &str) -> Verdict {
        let differs =
            |found: &[Difference]| found.iter().any(|d| d.output == output || d.output.is_empty());
        match (&self.pass.verdict, &self.differences) {
            (Verdict::Unchanged | Verdict::Assumed, _) => self.pass.verdict,
            (_, [.., real]) if differs(real) => Verdict::NotShown,
            (_, [bits, ..]) if !differs(bits) && !self.wide.contains(output) => Verdict::Bits,
            (_, [bits, ..]) if !differs(bits) => Verdict::KeptWide,
            (_, [_, rounded, _]) if !differs(rounded) => Verdict::Equal,
            _ => Verdict::Rounded,
        }
    }
}

/// What is known of each of these, of which none needs another: bits, rounded numbers and real ones in a thread each. What has the same
/// bits is not compared again. Those that come `late` are waited for when the others are done.
pub(super) fn checked(steps: &[&Step], late: Option<&OnceLock<Vec<Step>>>) -> Vec<Found> {
    let all = || steps.iter().copied().chain(late.into_iter().flat_map(|late| late.wait()));
    let at = |i: usize| match steps.get(i) {
        Some(step) => step,
        None => &late.expect("invariant: a step is one of these").wait()[i - steps.len()],
    };
    let shards = |step: &Step| step.pass == shard::INFO.name;
    let compare = |comparer: &mut Comparer, step: &Step| {
        let before = &step.before;
        let comparer = comparer.before_gradients(before.before_gradients);
        comparer.compare(&before.before, &step.after, before.ranks)
    };
    // Each sends those that are not equal to the next.
    let (sender, not_bits) = channel::<(usize, Vec<Difference>)>();
    let (to_real, not_equal) = channel::<(usize, [Vec<Difference>; 2])>();
    let is_kept = |step: &Step| match step.duty {
        Duty::Nothing(_) => false,
        Duty::Statement => shards(step),
        Duty::Outputs => true,
    };
    let bits = || {
        let sender = sender;
        let mut comparer = Comparer::of_bits();
        for (i, step) in all().enumerate().filter(|(_, step)| is_kept(step)) {
            let found = compare(&mut comparer, step);
            if !found.is_empty() && sender.send((i, found)).is_err() {
                return;
            }
        }
    };
    let rounded = || {
        let to_real = to_real;
        let mut comparer = Comparer::of_rounded_numbers();
        for (i, bits) in not_bits {
            let step = at(i);
            let found = match shards(step) {
                true => step.before.distributed(&mut comparer, &step.after),
                false => compare(&mut comparer, step),
            };
            if to_real.send((i, [bits, found])).is_err() {
                return;
            }
        }
    };
    let real = || {
        // A number of 16 bits is the one before it that is rounded to it, so what is compared in order is not mixed with statements
        // of later passes.
        let mut stated = Comparer::of_real_numbers();
        let mut results = vec![];
        for step in all() {
            let (verdict, found) = match step.duty {
                Duty::Nothing(verdict) => {
                    let refused = step.refused.iter().map(|what| Difference {
                        output: String::new(),
                        origin: Origin::none(),
                        what: what.clone(),
                    });
                    (verdict, refused.collect())
                }
                Duty::Outputs if step.wide().is_empty() => (Verdict::Bits, vec![]),
                Duty::Outputs => (Verdict::KeptWide, vec![]),
                Duty::Statement => {
                    let found = step.before.against_statement(&mut stated, &step.pass, &step.after);
                    let holds = found.is_empty();
                    (if holds { Verdict::AsStated } else { Verdict::NotShown }, found)
                }
            };
            let pass = step.checked(verdict, &found);
            results.push(Found { pass, wide: step.wide(), differences: [vec![], vec![], found] });
        }
        drop(stated);
        let mut comparer = Comparer::of_real_numbers();
        for (i, [bits, rounded]) in not_equal {
            let step = at(i);
            let mut real = vec![];
            if matches!(step.duty, Duty::Outputs) {
                let (verdict, shown) = if rounded.is_empty() {
                    (Verdict::Equal, &bits)
                } else {
                    real = compare(&mut comparer, step);
                    let equal = real.is_empty();
                    if equal { (Verdict::Rounded, &rounded) } else { (Verdict::NotShown, &real) }
                };
                results[i].pass = step.checked(verdict, shown);
            } else {
                real = std::mem::take(&mut results[i].differences[2]);
            }
            results[i].differences = [bits, rounded, real];
        }
        results
    };
    thread::scope(|scope| {
        // Joined, because glibc 2.36 may read a thread that ends while it is let go after it was freed.
        let others =
            [scope.spawn(|| on_large_stack(bits)), scope.spawn(|| on_large_stack(rounded))];
        let all = on_large_stack(real);
        others.into_iter().for_each(|t| t.join().expect("comparison does not panic"));
        all
    })
}

/// What is known of each output of the last graph, from what is known of the passes behind the last that states what it adds.
pub(super) fn kept(last: &Graph, found: &[Found], ranks: usize) -> Vec<Kept> {
    let named = |pass: &str| match pass == shard::INFO.name && ranks > 1 {
        true => format!("{pass} over {ranks} ranks"),
        false => pass.to_string(),
    };
    let added = [loss::INFO, differentiate::INFO, update::INFO].map(|info| info.name);
    let stated = found.iter().rposition(|f| added.contains(&f.pass.pass.as_str()));
    let behind = &found[stated.map_or(0, |k| k + 1)..];
    let of_output = |Roundings { output, operations }: Roundings| {
        let known = behind.iter().map(|f| (f, f.of(&output)));
        let passes = known.clone().filter(|(_, verdict)| *verdict > Verdict::Bits);
        let operations = operations.into_iter().map(|(dtype, op)| format!("{op} to {dtype}"));
        Kept {
            verdict: known.map(|(_, verdict)| verdict).max().unwrap_or(Verdict::Unchanged),
            passes: passes.map(|(f, _)| named(&f.pass.pass)).collect(),
            operations: operations.collect(),
            output,
        }
    };
    roundings(last).into_iter().map(of_output).collect()
}
