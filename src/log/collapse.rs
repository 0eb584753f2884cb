//! Pictures of a diagnosis: the score matrix, and the way of a run over the plane of entropy and mutual
//! information.

use embedded_graphics::mono_font::MonoTextStyle;
use embedded_graphics::mono_font::ascii::{FONT_7X13, FONT_9X15_BOLD};
use embedded_graphics::pixelcolor::Rgb888;
use embedded_graphics::prelude::*;
use embedded_graphics::primitives::{PrimitiveStyle, Rectangle};
use embedded_graphics::text::{Alignment, Text};

use super::picture::{
    Axes, Drawn, HEIGHT, INK, LEFT, Mark, PLAIN, Picture, STRONG, TOP, WIDTH, draw_mark, label,
    line, ticks,
};
use crate::diagnostics::{Baseline, History, RowRecord};

/// Rows and columns of a matrix that are drawn at most.
const MOST_CELLS: usize = 400;
/// The side of a cell, if there is room.
const CELL: usize = 24;
/// Below the matrix.
const FOOT: i32 = 60;

/// The score matrix: a row a span, a column a context, dark where a context scores best in its row, the
/// row's own context ringed.
pub struct Heatmap<'a> {
    /// The rows.
    pub rows: &'a [RowRecord],
}

impl Heatmap<'_> {
    /// Draws the picture.
    pub fn draw(&self) -> Picture {
        let rows = &self.rows[..self.rows.len().min(MOST_CELLS)];
        let all = rows.first().map_or(0, |row| row.log_likelihood.len());
        let columns = all.min(MOST_CELLS);
        let side = |count: usize| (MOST_CELLS / count.max(1)).clamp(1, CELL) as i32;
        let (width, height) = (side(columns), side(rows.len()));
        let picture_width = (LEFT + 20 + width * columns as i32).max(WIDTH);
        let bottom = TOP + height * rows.len() as i32;
        let mut picture = Picture::new(picture_width as u32, (bottom + FOOT) as u32);
        // Half of what a typical row loses by a wrong context is half dark.
        let scale = typical_loss(rows);
        let Ok(()) = self.draw_texts(&mut picture, bottom, all, scale).and_then(|()| {
            rows.iter().enumerate().try_for_each(|(at, row)| {
                let losses = losses(row);
                losses.iter().take(columns).enumerate().try_for_each(|(column, loss)| {
                    let corner = Point::new(LEFT + column as i32 * width, TOP + at as i32 * height);
                    let cell = Rectangle::new(corner, Size::new(width as u32, height as u32));
                    cell.into_styled(PrimitiveStyle::with_fill(shade(loss / scale)))
                        .draw(&mut picture)?;
                    if column == row.column && width.min(height) > 2 {
                        cell.into_styled(PrimitiveStyle::with_stroke(STRONG, 1))
                            .draw(&mut picture)?;
                    }
                    Ok(())
                })
            })
        });
        picture
    }

    fn draw_texts(&self, picture: &mut Picture, bottom: i32, columns: usize, scale: f64) -> Drawn {
        let small = MonoTextStyle::new(&FONT_7X13, INK);
        let bold = MonoTextStyle::new(&FONT_9X15_BOLD, INK);
        let middle = picture.width() as i32 / 2;
        let title = "Reasoning under the contexts of others";
        Text::with_alignment(title, Point::new(middle, 22), bold, Alignment::Center)
            .draw(picture)?;
        let count = self.rows.len();
        let axes = format!("{count} spans (down), {columns} contexts (across); red: its own");
        Text::new(&axes, Point::new(8, bottom + 22), small).draw(picture)?;
        let scale = format!("dark: best of the row; white: {} nats a token worse", label(scale));
        Text::new(&scale, Point::new(8, bottom + 42), small).draw(picture)?;
        Ok(())
    }
}

/// By how much each context scores below the best of the row, per token.
fn losses(row: &RowRecord) -> Vec<f64> {
    let best = row.log_likelihood.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    row.log_likelihood.iter().map(|score| (best - score) / row.length as f64).collect()
}

/// Twice the mean of the finite losses; 1 where there are none.
fn typical_loss(rows: &[RowRecord]) -> f64 {
    let losses: Vec<f64> =
        rows.iter().flat_map(losses).filter(|loss| loss.is_finite() && *loss > 0.0).collect();
    crate::gradient::mean(&losses).map_or(1.0, |mean| 2.0 * mean)
}

/// From the plain color at 0 to white at 1.
fn shade(share: f64) -> Rgb888 {
    let share = if share.is_nan() { 1.0 } else { share.clamp(0.0, 1.0) };
    let mix = |dark: u8| (f64::from(dark) + share * (255.0 - f64::from(dark))).round() as u8;
    Rgb888::new(mix(20), mix(60), mix(120))
}

/// The plane of H(Z | X) and I(X; Z), and the way of a run over it.
pub struct Plane<'a> {
    /// The way.
    pub history: &'a History,
    /// What high and low are measured by.
    pub baseline: Option<Baseline>,
    /// The share of it that is low.
    pub low: f64,
}

impl Plane<'_> {
    /// Draws the picture.
    pub fn draw(&self) -> Picture {
        let way: Vec<(f64, f64)> = self
            .history
            .measured()
            .map(|step| (step.conditional_entropy_est, step.mi_estimate))
            .collect();
        // Of nothing, or less, there is no share that could be low.
        let center = self
            .baseline
            .map(|baseline| (baseline.conditional_entropy_est, baseline.mi_estimate))
            .filter(|(entropy, mi)| *entropy > 0.0 && *mi > 0.0);
        let points = || way.iter().copied().chain(center);
        let axes = Axes {
            title: "Entropy and mutual information of the reasoning",
            legend: "red: the last step   lines: low and high against the baseline",
            x_label: "H(Z|X), nats a token",
            y_label: "I(X;Z), nats a token",
            x_ticks: ticks(points().map(|(x, _)| x)),
            y_ticks: ticks(points().map(|(_, y)| y)),
        };
        let mut picture = Picture::new(WIDTH as u32, HEIGHT as u32);
        let Ok(()) = self.draw_on(&mut picture, &axes, &way, center);
        picture
    }

    fn draw_on(
        &self,
        picture: &mut Picture,
        axes: &Axes,
        way: &[(f64, f64)],
        center: Option<(f64, f64)>,
    ) -> Drawn {
        axes.draw_on(picture)?;
        if let Some((entropy, mi)) = center {
            self.draw_quadrants(picture, axes, entropy * self.low, mi * self.low)?;
        }
        for pair in way.windows(2) {
            let (from, to) = (axes.place(pair[0].0, pair[0].1), axes.place(pair[1].0, pair[1].1));
            line(picture, from, to, PLAIN)?;
        }
        way.iter().enumerate().try_for_each(|(index, (x, y))| {
            let strong = index + 1 == way.len();
            draw_mark(picture, axes, &Mark { x: *x, y: *y, strong, filled: true })
        })
    }

    fn draw_quadrants(&self, picture: &mut Picture, axes: &Axes, x: f64, y: f64) -> Drawn {
        let ((left, right), (bottom, top)) = (axes.x_ends(), axes.y_ends());
        line(picture, axes.place(x, bottom), axes.place(x, top), INK)?;
        line(picture, axes.place(left, y), axes.place(right, y), INK)?;
        let small = MonoTextStyle::new(&FONT_7X13, INK);
        let (below, above) = (Point::new(0, 14), Point::new(0, -6));
        let margin = Point::new(4, 0);
        // In the outer corners, where the lines may leave little room beside them.
        for (name, corner, shift, alignment) in [
            ("compressed", axes.place(left, top), below + margin, Alignment::Left),
            ("diverse", axes.place(right, top), below - margin, Alignment::Right),
            ("low-entropy collapse", axes.place(left, bottom), above + margin, Alignment::Left),
            ("template collapse", axes.place(right, bottom), above - margin, Alignment::Right),
        ] {
            Text::with_alignment(name, corner + shift, small, alignment).draw(picture)?;
        }
        Ok(())
    }
}
