//! The museum of silent errors, `tests/museum`: training errors that were published and raised nothing. Every file is one of them and
//! has attempts to make the same mistake here, which are executed. `UPDATE_EXPECT=1` writes `docs/silent-errors.md` from the files.

mod attempt;
mod data;
mod edit;
mod exhibit;
mod page;
mod refuted;
mod trial;

use crate::support::file;
use exhibit::{Exhibit, exhibits};
use expect_test::expect_file;
use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Executes the attempts of these exhibits, all of them even if some fail.
fn attempt_all(part: usize, parts: usize) {
    let mut failed = Vec::new();
    for (at, exhibit) in exhibits().iter().enumerate() {
        if at % parts != part {
            continue;
        }
        for attempt in &exhibit.attempts {
            let tried = catch_unwind(AssertUnwindSafe(|| attempt.make()));
            let found = match tried {
                Ok(Ok(())) => continue,
                Ok(Err(found)) => found,
                Err(_) => "panicked, see above".into(),
            };
            failed.push(format!("{}: {}\n    {found}", exhibit.name, attempt.what));
        }
    }
    assert!(failed.is_empty(), "{} attempts:\n{}", failed.len(), failed.join("\n"));
}

#[test]
fn the_first_third_is_as_the_files_say() {
    attempt_all(0, 3);
}

#[test]
fn the_second_third_is_as_the_files_say() {
    attempt_all(1, 3);
}

#[test]
fn the_last_third_is_as_the_files_say() {
    attempt_all(2, 3);
}

#[test]
fn the_page_is_made_of_the_files() {
    expect_file![file("docs/silent-errors.md")].assert_eq(&page::page(&exhibits()));
}

#[test]
fn every_error_is_told_once_and_has_a_source() {
    let exhibits = exhibits();
    let links: BTreeSet<&str> = exhibits.iter().map(|e| e.link.as_str()).collect();
    assert_eq!(links.len(), exhibits.len(), "two files have one link");
    for Exhibit { name, link, attempts, untested, .. } in &exhibits {
        assert!(link.starts_with("https://"), "{name}: {link}");
        assert_ne!(
            attempts.is_empty(),
            untested.is_none(),
            "{name}: attempts, or why there are none"
        );
    }
}
