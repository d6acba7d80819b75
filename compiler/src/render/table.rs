//! Formats tables as text.

use std::fmt::Write;

/// Rows as aligned columns; numbers, by their first character, to the right.
pub(crate) fn table(head: &[&str], rows: &[Vec<String>]) -> String {
    let mut widths: Vec<usize> = head.iter().map(|h| h.len()).collect();
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let mut text = String::new();
    let head: Vec<String> = head.iter().map(|h| h.to_string()).collect();
    for row in std::iter::once(&head).chain(rows) {
        let mut line = String::new();
        for (cell, width) in row.iter().zip(&widths) {
            let number = cell.starts_with(|c: char| c.is_ascii_digit());
            let pad = " ".repeat(width - cell.chars().count());
            let cell = if number { format!("{pad}{cell}") } else { format!("{cell}{pad}") };
            line += &cell;
            line += "  ";
        }
        // Writing to a string does not fail.
        let _ = writeln!(text, "{}", line.trim_end());
    }
    text
}
