//! What a filter kept, and why, on the terminal.

use std::fmt::Write;

use comfy_table::{Cell, CellAlignment, ContentArrangement, Table, TableComponent, presets};
use gradprism::config::FilterConfig;
use gradprism::filter::{LossScale, Reason, Strategy};
use gradprism::log::number;
use gradprism::sift::{SiftGroup, SiftReport, SiftStep};

/// Groups that a table shows at most.
const MOST_GROUPS: usize = 40;

/// Every step: its groups by rank, then what they add up to.
pub fn sift(report: &SiftReport, filter: &FilterConfig) -> String {
    let mut text = String::new();
    for step in &report.steps {
        if report.steps.len() > 1 {
            // Writing to a string cannot fail, here and below.
            let _ = writeln!(text, "\nstep {}", step.step);
        }
        let _ = writeln!(text, "{}", groups(step, filter));
        if step.groups.len() > MOST_GROUPS {
            let more = step.groups.len() - MOST_GROUPS;
            let _ = writeln!(text, "… and {more} more groups in groups.jsonl");
        }
        text.push_str(&totals(step, filter));
    }
    text
}

fn groups(step: &SiftStep, filter: &FilterConfig) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::UTF8_HORIZONTAL_ONLY);
    for between_rows in [TableComponent::HorizontalLines, TableComponent::MiddleIntersections] {
        table.remove_style(between_rows);
    }
    table.set_content_arrangement(ContentArrangement::Disabled);
    table.set_header([
        "rank",
        "group",
        "G",
        "reward",
        "RV",
        filter.score.name(),
        "mass so far",
        "kept",
        "why",
    ]);
    for (index, column) in table.column_iter_mut().enumerate() {
        if !matches!(index, 1 | 8) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    let mut order: Vec<&SiftGroup> = step.groups.iter().collect();
    // Those without a rank come last, in file order.
    order.sort_by_key(|group| group.verdict.rank.unwrap_or(usize::MAX));
    let optional = |value: Option<f64>| value.map_or("-".into(), number);
    for group in order.into_iter().take(MOST_GROUPS) {
        let verdict = &group.verdict;
        table.add_row([
            Cell::new(verdict.rank.map_or("-".into(), |rank| rank.to_string())),
            Cell::new(&group.group_id),
            Cell::new(group.group_size),
            Cell::new(number(group.scores.reward_mean)),
            Cell::new(number(group.scores.reward_variance)),
            Cell::new(optional(verdict.score)),
            Cell::new(verdict.held_share.map_or("-".into(), |share| format!("{share:.3}"))),
            Cell::new(if verdict.kept { "yes" } else { "no" }),
            Cell::new(why(verdict.reason, filter)),
        ]);
    }
    table
}

fn why(reason: Reason, filter: &FilterConfig) -> &'static str {
    match (reason, filter.strategy) {
        (Reason::Chosen, Strategy::TopP) => "first of the mass",
        (Reason::Chosen, Strategy::TopK | Strategy::TopKAbs) => "among the first",
        (Reason::Chosen, Strategy::MinP | Strategy::Threshold) => "within the limit",
        (Reason::Chosen, Strategy::None) => "every group",
        (Reason::KeepAll, _) => "none was chosen",
        (Reason::Zero, _) => "its score is 0",
        (Reason::Undefined, _) => "it has no score",
        (Reason::BeyondCut, _) => "beyond the cut",
    }
}

fn totals(step: &SiftStep, filter: &FilterConfig) -> String {
    let (kept, reasons) = (&step.kept, &step.reasons);
    let mut text = String::new();
    let _ = writeln!(
        text,
        "{} of {} groups kept ({} of {} trajectories) by {}; the last of them has {}",
        kept.groups,
        step.group_count,
        step.kept_trajectories,
        step.trajectories,
        filter.score.name(),
        kept.cut.map_or("none".into(), number),
    );
    let _ = writeln!(
        text,
        "left out: {} with a score of 0, {} without a score, {} beyond the cut",
        reasons.zero, reasons.undefined, reasons.beyond_cut
    );
    let spread = |spread: Option<f64>| spread.map_or("undefined".into(), number);
    let _ = write!(text, "Std(RV)/Mean(RV) {}", spread(kept.reward_variance_spread));
    if let Some(rate) = kept.keep_rate {
        let averaged = spread(kept.adaptive_spread);
        let _ = write!(text, ", averaged {averaged}: keep rate {}", number(rate));
    }
    let size = filter.mini_batch_size.map_or("all groups".into(), |size| format!("{size} groups"));
    let _ = write!(
        text,
        "; {} of {} optimiser steps remain at {size} a step",
        kept.optimizer_steps, kept.optimizer_steps_unfiltered,
    );
    if filter.loss_scale != LossScale::None {
        let _ = write!(text, "; the loss is to be multiplied by {}", number(kept.loss_factor));
    }
    text.push('\n');
    text
}
