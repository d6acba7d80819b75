//! A certificate in sum: its outputs by verdict, and what it assumes.

use super::{Certificate, Checked, Kept, Verdict};
use std::collections::{BTreeMap, BTreeSet};

/// Said wherever bits are: it is a statement about graphs.
pub const KERNELS: &str =
    "an operation has the same bits in every kernel, inside and outside of fused regions";

/// Said wherever numbers are compared as real ones.
const REAL_NUMBERS: [&str; 5] = [
    "labels and indices are in range and not negative",
    "every value is a number or infinite",
    "roots and logarithms are of positive numbers",
    "scores that are excluded by -10,000 or less have no weight, and constants below -1e30 are −∞",
    "scalars within 2e-6 are equal, as are elements of constants rounded to 16 bits within a rounding error of bf16; integers are exact",
];

/// Outputs of the same verdict.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Group<'a> {
    /// How many of them are of each kind.
    pub kinds: BTreeMap<&'static str, usize>,
    /// The passes that do not keep their bits.
    pub passes: BTreeSet<&'a str>,
}

impl Group<'_> {
    /// How many outputs these are.
    pub fn count(&self) -> usize {
        self.kinds.values().sum()
    }

    /// How many of which kind, in words.
    pub fn kinds(&self) -> String {
        let kinds: Vec<_> = self.kinds.iter().map(|(kind, n)| format!("{kind}: {n}")).collect();
        kinds.join(", ")
    }

    /// The names of the passes.
    pub fn passes(&self) -> String {
        list(&self.passes)
    }
}

impl Certificate {
    /// The outputs of the step by what is known of them.
    pub fn groups(&self) -> BTreeMap<Verdict, Group<'_>> {
        let mut groups: BTreeMap<Verdict, Group> = BTreeMap::new();
        for output in &self.outputs {
            let group = groups.entry(output.verdict.max(Verdict::Bits)).or_default();
            *group.kinds.entry(kind(output)).or_default() += 1;
            group.passes.extend(output.passes.iter().map(String::as_str));
        }
        groups
    }

    /// How many outputs are rounded to less than 32 bits, and by what.
    pub fn rounded(&self) -> Option<String> {
        let rounded = self.outputs.iter().filter(|output| !output.operations.is_empty());
        let operations = rounded.clone().flat_map(|output| &output.operations);
        let operations: BTreeSet<&str> = operations.map(String::as_str).collect();
        let count = rounded.count();
        (count > 0).then(|| format!("{count} outputs rounded, by {}", list(&operations)))
    }

    /// What it takes for granted, a sentence each.
    pub fn assumptions(&self) -> Vec<String> {
        let all = || self.passes.iter().chain(&self.evaluation);
        let meant = all().filter(|p| p.verdict == Verdict::Assumed).map(|p| p.pass.as_str());
        let meant: BTreeSet<&str> = meant.collect();
        let mut said = vec![];
        if !meant.is_empty() {
            said.push(format!("what these passes do is what the model means: {}", list(&meant)));
        }
        let bits = |v: Verdict| matches!(v, Verdict::Bits | Verdict::KeptWide);
        if self.outputs.iter().any(|o| bits(o.verdict)) || all().any(|p| bits(p.verdict)) {
            said.push(KERNELS.into());
        }
        let real = |p: &Checked| {
            matches!(p.verdict, Verdict::Equal | Verdict::Rounded | Verdict::AsStated)
        };
        if all().any(real) {
            said.extend(REAL_NUMBERS.map(String::from));
        }
        said
    }
}

/// What an output is, from its name.
fn kind(output: &Kept) -> &'static str {
    match output.output.split(' ').next() {
        Some("carry") => "parameters and states",
        Some("gradient") => "gradients",
        Some("metric") => "metrics",
        _ => "results",
    }
}

fn list(words: &BTreeSet<&str>) -> String {
    words.iter().copied().collect::<Vec<_>>().join(", ")
}
