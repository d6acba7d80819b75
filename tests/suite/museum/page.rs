//! The page `docs/silent-errors.md`.

use super::exhibit::{Exhibit, Status};
use std::collections::BTreeMap;
use std::fmt::Write;

/// The page of these exhibits.
pub(super) fn page(exhibits: &[Exhibit]) -> String {
    let mut page = String::from(
        "# Silent errors\n\n\
         Training errors that were published, raised nothing, and what Frit does about the same mistake. Each is a file of\n\
         `tests/museum/`, of which this page is made (`UPDATE_EXPECT=1 cargo test museum`); `tests/suite/museum/` executes every attempt\n\
         listed here, also those that succeed: an entry that is no longer true fails a test. Those that are not caught come first.\n\n",
    );
    counts(&mut page, exhibits);
    page.push_str(
        "\nTrainCheck (OSDI 2025) reproduced 20 errors; the list of its artifact, from which these entries come, names 18 of them, and its\n\
         documentation tells of others. TTrace (arXiv 2506.09280) found 14 bugs of Megatron-LM and TransformerEngine; its table was not at\n\
         hand. Entered under its name are the two that another source attributes to it (#599, #1446), the one that its first author reported\n\
         (#1464), and one by the account that reported #1446 and a copy of #1464 (#1503); reports of the same kinds are under their projects.\n\
         The rest are issues and pull requests; pytorch#190626, which users name as one of the worst, could not be read and is missing.\n\
         Links of one entry report the same mistake.\n",
    );
    for status in Status::ALL {
        let of: Vec<&Exhibit> = exhibits.iter().filter(|e| e.status == status).collect();
        if of.is_empty() {
            continue;
        }
        let _ = write!(page, "\n## {} ({})\n\n{}\n", heading(status), of.len(), status.meaning());
        of.iter().for_each(|e| entry(&mut page, e));
    }
    page
}

fn heading(status: Status) -> String {
    let name = status.name();
    name[..1].to_uppercase() + &name[1..]
}

/// Sources against outcomes.
fn counts(page: &mut String, exhibits: &[Exhibit]) {
    let mut by_source: BTreeMap<&str, [usize; Status::ALL.len()]> = BTreeMap::new();
    for exhibit in exhibits {
        by_source.entry(&exhibit.source).or_default()[exhibit.status as usize] += 1;
    }
    let names: Vec<&str> = Status::ALL.iter().map(|s| s.name()).collect();
    let _ = writeln!(page, "| source | {} | all |", names.join(" | "));
    let _ = writeln!(page, "|---|{}---|", "---|".repeat(names.len()));
    let mut row = |source: &str, counts: &[usize]| {
        let cells: Vec<String> = counts.iter().map(usize::to_string).collect();
        let all: usize = counts.iter().sum();
        let _ = writeln!(page, "| {source} | {} | {all} |", cells.join(" | "));
    };
    by_source.iter().for_each(|(source, counts)| row(source, counts));
    let sum = |i: usize| by_source.values().map(|c| c[i]).sum();
    row("all", &(0..names.len()).map(sum).collect::<Vec<usize>>());
}

fn entry(page: &mut String, exhibit: &Exhibit) {
    let Exhibit { name, title, source, link, also, happened, here, untested, attempts, .. } =
        exhibit;
    let reports = std::iter::once(link).chain(also).map(|l| format!("[{}]({l})", label(l)));
    let reports = reports.collect::<Vec<_>>().join(", ");
    let _ = write!(page, "\n### {title}\n\n{source} · {reports} · `{name}.toml`\n\n");
    let _ = write!(page, "{}\n\n{}\n", filled(happened), filled(&format!("**Here:** {here}")));
    if let Some(why) = untested {
        let _ = write!(page, "\n{}\n", filled(&format!("Not tested: {why}.")));
    }
    if !attempts.is_empty() {
        page.push('\n');
        for attempt in attempts {
            let _ = writeln!(page, "- {}", attempt.described());
        }
    }
}

/// The text in lines of at most 140 characters.
fn filled(text: &str) -> String {
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let line = lines.last_mut().expect("a line");
        if line.is_empty() {
            *line = word.into();
        } else if line.chars().count() + 1 + word.chars().count() <= 140 {
            *line += &format!(" {word}");
        } else {
            lines.push(word.into());
        }
    }
    lines.join("\n")
}

/// `owner/repository#number` for issues and pull requests, else the host and path.
fn label(link: &str) -> String {
    let rest = link.trim_start_matches("https://");
    let parts: Vec<&str> = rest.split('/').collect();
    match parts[..] {
        ["github.com", _, repository, "issues" | "pull", number] => {
            format!("{repository}#{}", number.split('#').next().unwrap_or(number))
        }
        ["arxiv.org", _, number] => format!("arXiv {number}"),
        _ => rest.trim_end_matches('/').into(),
    }
}
