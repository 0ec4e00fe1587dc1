//! SVG plots: bars, a group per load, a colour per program.

use std::error::Error;
use std::path::Path;

use anyhow::{Result, anyhow};
use plotters::prelude::{
    ChartBuilder, Color as _, IntoDrawingArea as _, IntoFont as _, IntoTextStyle as _, Palette as _,
    Palette99, Rectangle, SVGBackend, SeriesLabelPosition, Text, WHITE,
};
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::measured::{Measure, Row};
use super::program::Program;

/// In pixels.
const SIZE: (u32, u32) = (1600, 480);
const LABEL_GAP: i32 = 8;
/// Part of a load's room that the bars fill where they are most.
const FILLED: f64 = 0.9;
/// Width of the room for the legend, as a part of that for the loads.
const LEGEND: f64 = 0.13;

/// Writes one measure of these rows to `file`.
pub(super) fn bars(file: &Path, rows: &[&Row<'_>], measure: &Measure) -> Result<()> {
    draw(file, rows, measure).map_err(|e| anyhow!("plot {}: {e}", file.display()))
}

fn draw(file: &Path, rows: &[&Row<'_>], measure: &Measure) -> Result<(), Box<dyn Error>> {
    let value = |row: &Row<'_>, program| Some(row.median(program, measure)).filter(|value| value.is_finite());
    let is_there = |program: &Program| rows.iter().any(|row| value(row, *program).is_some());
    let programs: Vec<_> =
        Program::ALL.into_iter().enumerate().filter(|(_, program)| is_there(program)).collect();
    let values = rows.iter().flat_map(|row| programs.iter().filter_map(|(_, program)| value(row, *program)));
    let top = values.fold(0.0, f64::max).max(f64::MIN_POSITIVE) * 1.05;

    let root = SVGBackend::new(file, SIZE).into_drawing_area();
    root.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&root)
        .margin(12)
        .x_label_area_size(36)
        .y_label_area_size(70)
        .build_cartesian_2d(0.0..rows.len() as f64 * (1.0 + LEGEND), 0.0..top)?;
    let title = format!("{}, {}", measure.name, measure.unit);
    chart.configure_mesh().disable_x_mesh().x_labels(0).y_desc(title).draw()?;
    let most = rows.iter().map(|row| row.lines.len()).max().unwrap_or(1);
    let width = FILLED / most.max(1) as f64;
    for (colour, program) in &programs {
        let style = Palette99::pick(*colour).filled();
        let bar = |(index, row): (usize, &&Row<'_>)| {
            let place = row.lines.iter().position(|line| line.program == *program)?;
            let left = index as f64 + 0.5 + (place as f64 - row.lines.len() as f64 / 2.0) * width;
            value(row, *program)
                .map(|height| Rectangle::new([(left, 0.0), (left + width * 0.92, height)], style))
        };
        chart
            .draw_series(rows.iter().enumerate().filter_map(bar))?
            .label(program.name())
            .legend(move |(x, y)| Rectangle::new([(x, y - 5), (x + 12, y + 5)], style));
    }
    for (index, row) in rows.iter().enumerate() {
        let (x, y) = chart.backend_coord(&(index as f64 + 0.5, 0.0));
        let style =
            ("sans-serif", 11).into_font().into_text_style(&root).pos(Pos::new(HPos::Center, VPos::Top));
        root.draw(&Text::new(row.workload.name, (x, y + LABEL_GAP), style))?;
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .background_style(WHITE.mix(0.8))
        .draw()?;
    root.present()?;
    Ok(())
}
