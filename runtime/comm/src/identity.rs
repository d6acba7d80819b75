//! What must be equal on all ranks of a job: the plan, and settings of the run. Ranks compare it before they begin, because one that
//! takes more steps than another waits for it forever.

use std::collections::BTreeMap;
use std::fmt::{Display, Write};

/// The value of what was not given.
const NOT_GIVEN: &str = "not given";

/// What to do if a setting differs that is an option.
const SAME_OPTIONS: &str = "start every rank with the same options";

/// A plan and settings, as text: the hash of the plan, then a line for each setting with its value and what to do if it differs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity(String);

impl Identity {
    /// A plan by its hash, without settings.
    pub fn of_plan(hash: &str) -> Identity {
        Identity(hash.into())
    }

    /// Adds a setting, which is an option.
    pub fn add(&mut self, name: &str, value: impl Display) {
        self.add_with(name, value, SAME_OPTIONS);
    }

    /// Adds what follows from files, with what to do if it differs.
    pub fn add_with(&mut self, name: &str, value: impl Display, remedy: &str) {
        // Writing to a text does not fail.
        let _ = write!(self.0, "\n{name}\t{value}\t{remedy}");
    }

    /// Adds a setting that has a value.
    pub fn add_if(&mut self, name: &str, value: Option<impl Display>) {
        if let Some(value) = value {
            self.add(name, value);
        }
    }

    /// Adds an option that has no value, or one that may differ.
    pub fn add_option(&mut self, name: &str, is_given: bool) {
        self.add_if(name, is_given.then_some("given"));
    }

    /// As text, which ranks exchange.
    pub fn text(&self) -> &str {
        &self.0
    }
}

/// How the identity of `rank` differs from that of rank 0, and what to do.
pub(super) fn difference(rank: usize, theirs: &str, own: &str) -> Option<String> {
    if theirs == own {
        return None;
    }
    let ((their_plan, theirs), (own_plan, own)) = (parts(theirs), parts(own));
    if their_plan != own_plan {
        return Some(format!(
            "rank {rank} runs another plan than rank 0; give every rank the same"
        ));
    }
    let mut names: Vec<&str> = theirs.keys().chain(own.keys()).copied().collect();
    names.sort_unstable();
    names.dedup();
    let (mut found, mut remedies) = (vec![], vec![]);
    for name in names {
        let value = |of: &Settings<'_>| of.get(name).map_or(NOT_GIVEN, |v| v.0).to_string();
        let (their_value, own_value) = (value(&theirs), value(&own));
        if their_value != own_value {
            found.push(format!("{name} is {their_value} on rank {rank} and {own_value} on rank 0"));
            let remedy = own.get(name).or(theirs.get(name)).map_or(SAME_OPTIONS, |v| v.1);
            if !remedies.contains(&remedy) {
                remedies.push(remedy);
            }
        }
    }
    Some(format!("{}; {}", found.join("; "), remedies.join("; ")))
}

/// Values of settings, and what to do if they differ, by name.
type Settings<'a> = BTreeMap<&'a str, (&'a str, &'a str)>;

/// The plan, and the settings by name.
fn parts(text: &str) -> (&str, Settings<'_>) {
    let (plan, settings) = text.split_once('\n').unwrap_or((text, ""));
    let settings = settings.lines().filter_map(|line| {
        let (name, rest) = line.split_once('\t')?;
        Some((name, rest.split_once('\t')?))
    });
    (plan, settings.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_differs_is_named() {
        let identity = |plan: &str, steps: usize, saves: bool, lr: Option<f64>| {
            let mut identity = Identity::of_plan(plan);
            identity.add("--steps", steps);
            identity.add_option("--save", saves);
            identity.add_if("optimizer.lr", lr);
            identity
        };
        let own = identity("abc", 5, true, None);
        let found = |other: Identity| difference(2, other.text(), own.text());
        assert_eq!(found(own.clone()), None);
        let other = found(identity("abd", 6, true, None)).unwrap_or_default();
        assert!(other.starts_with("rank 2 runs another plan"), "{other}");
        let more = found(identity("abc", 6, true, None)).unwrap_or_default();
        assert!(more.starts_with("--steps is 6 on rank 2 and 5 on rank 0; start"), "{more}");
        let all = found(identity("abc", 5, false, Some(0.5))).unwrap_or_default();
        assert!(all.contains("--save is not given on rank 2 and given on rank 0; "), "{all}");
        assert!(all.contains("optimizer.lr is 0.5 on rank 2 and not given on rank 0"), "{all}");
        assert_eq!(all.matches(SAME_OPTIONS).count(), 1, "{all}");
    }

    #[test]
    fn what_follows_from_files_has_a_remedy_of_its_own() {
        let identity = |start: usize| {
            let mut identity = Identity::of_plan("abc");
            identity.add("--steps", 5);
            identity.add_with("the first step", start, "give all the same directory");
            identity
        };
        let found = difference(1, identity(0).text(), identity(3).text());
        let expected = "the first step is 0 on rank 1 and 3 on rank 0; give all the same directory";
        assert_eq!(found.as_deref(), Some(expected));
    }
}
