//! What is certified of a plan: its outputs by verdict, the verdict of every pass, and what is assumed.

use super::escape;
use crate::certificate::{Certificate, Checked, Verdict};
use crate::diagnostics::Report;
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// The certificate of a plan, or why there is none.
#[derive(Clone, Debug)]
pub struct Certified {
    /// The plan directory.
    pub plan: PathBuf,
    /// What was found, if it was looked for.
    pub found: Option<Result<Certificate, Report>>,
}

impl Certified {
    /// Of a page without a certificate.
    pub fn left_out(plan: &Path) -> Certified {
        Certified { plan: plan.into(), found: None }
    }

    /// The section.
    pub(super) fn section(&self) -> String {
        let command = format!("<code>frit verify {}", escape(&self.plan.display().to_string()));
        match &self.found {
            None => format!("<p>left out; {command}</code> shows it</p>"),
            Some(Err(report)) => refused(report, &command),
            Some(Ok(certificate)) => {
                let whole = format!(
                    "<p class=sub>{command} --json</code> has the verdict of each output; {command}</code> also compares the files \
                     of the plan with their digests.</p>"
                );
                shown(certificate) + &whole
            }
        }
    }
}

/// Why there is no certificate.
fn refused(report: &Report, command: &str) -> String {
    let mut html = String::from("<p><span class='tag error'>no certificate</span></p><ul>");
    for d in &report.diagnostics {
        let _ = write!(html, "<li>{} <small>{}</small>", escape(&d.message), escape(&d.code));
        for note in d.notes.iter().chain(&d.help) {
            let _ = write!(html, "<br><small>{}</small>", escape(note));
        }
    }
    html + &format!(
        "</ul><p class=sub>{command}</code> tries again; with <code>--model FILE</code> if the model was moved.</p>"
    )
}

fn shown(certificate: &Certificate) -> String {
    let open: Vec<&str> = certificate.open().iter().map(|p| p.pass.as_str()).collect();
    let mut html = match open.is_empty() {
        true => "<p><span class='tag certified'>certified</span> every rank computes the step of the model</p>".into(),
        false => format!(
            "<p><span class='tag warning'>not certified</span> not shown of {}</p>",
            escape(&open.join(", "))
        ),
    };
    html += &outputs(certificate);
    html += "<h3>Passes</h3>";
    html += &passes(&certificate.passes);
    if !certificate.evaluation.is_empty() {
        let (n, table) = (certificate.evaluation.len(), passes(&certificate.evaluation));
        html += &format!(
            "<details><summary>Evaluation <small>{n} passes</small></summary>{table}</details>"
        );
    }
    html += "<h3>Assumed</h3><ul>";
    for assumed in certificate.assumptions() {
        let _ = write!(html, "<li>{}", escape(&assumed));
    }
    html + "</ul>"
}

/// The outputs of the step, by what is known of them.
fn outputs(certificate: &Certificate) -> String {
    let mut html = String::from(
        "<div class=scroll><table><tr><th>outputs of the step<th class=n><th>which<th>passes that do not keep their bits",
    );
    for (verdict, group) in certificate.groups() {
        let _ = write!(
            html,
            "<tr><td>{}<td class=n>{}<td>{}<td>{}",
            verdict.words(),
            group.count(),
            group.kinds(),
            escape(&group.passes())
        );
    }
    html += "</table></div>";
    if let Some(rounded) = certificate.rounded() {
        let _ = write!(html, "<p class=sub>{}</p>", escape(&rounded));
    }
    html
}

/// The verdict of every pass, in order.
fn passes(passes: &[Checked]) -> String {
    let mut html = String::from("<div class=scroll><table><tr><th>pass<th>verdict");
    for Checked { pass, verdict, differences } in passes {
        let words = match verdict {
            Verdict::Unchanged => format!("<small>{}</small>", verdict.words()),
            Verdict::NotShown => format!("<span class='tag warning'>{}</span>", verdict.words()),
            _ => verdict.words().into(),
        };
        let _ = write!(html, "<tr><td>{}<td>{words}", escape(pass));
        for difference in differences.iter().filter(|_| *verdict == Verdict::NotShown) {
            let _ = write!(html, "<br><small>{}</small>", escape(difference));
        }
    }
    html + "</table></div>"
}
